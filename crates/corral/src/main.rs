//! The one binary: `corral up` and the command line client.
#![forbid(unsafe_code)]

mod cli;
mod client;
mod commands;
mod doctor;
mod output;
mod up;

use clap::Parser as _;
use cli::{Cli, Command};
use std::io::IsTerminal as _;
use std::process::ExitCode;

/// Exit code of `run`, `exec` and `sh` when Corral, not the command, failed (as with `docker run`).
const PLATFORM_FAILED: u8 = 125;

fn main() -> ExitCode {
    let cli = Cli::parse();
    start_log(&cli.command);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&cli, &anyhow::Error::new(error).context("cannot start the runtime")),
    };
    let code = match runtime.block_on(commands::dispatch(&cli)) {
        Ok(code) => code,
        Err(error) => failed(&cli, &error),
    };
    // A thread may still wait for standard input.
    runtime.shutdown_background();
    code
}

fn failed(cli: &Cli, error: &anyhow::Error) -> ExitCode {
    output::print_error(cli.json, error);
    match cli.command {
        Command::Run(_) | Command::Exec(_) | Command::Sh(_) => PLATFORM_FAILED.into(),
        _ => ExitCode::FAILURE,
    }
}

fn start_log(command: &Command) {
    let usual = if matches!(command, Command::Up(_)) { "info" } else { "off" };
    let filter = tracing_subscriber::EnvFilter::try_from_env("CORRAL_LOG").unwrap_or_else(|_| usual.into());
    // Colours are for eyes (no-color.org): in a file they are noise.
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let colours = std::io::stderr().is_terminal() && !plain;
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr).init();
}
