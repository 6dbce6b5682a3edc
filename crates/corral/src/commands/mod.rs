//! The client's commands, a file for each group.

mod build;
mod copy;
mod environments;
mod events;
mod exec;
mod images;
mod keys;
mod pack;
mod sandboxes;
mod shell;
mod system;
mod transfer;

use crate::cli::{Cli, Command};
use crate::client::Client;
use crate::{doctor, output, up};
use clap::CommandFactory as _;
use std::process::ExitCode;

/// Does what the command line says.
///
/// # Errors
/// It could not be done.
pub async fn dispatch(cli: &Cli) -> anyhow::Result<ExitCode> {
    match &cli.command {
        Command::Up(args) => return Box::pin(up::run(args, &cli.server, cli.json)).await.map(|()| ExitCode::SUCCESS),
        Command::Down(args) => return Box::pin(up::down::run(args, cli.json)).await.map(|()| ExitCode::SUCCESS),
        Command::Doctor(args) => return doctor::run(args, cli.json),
        Command::Openapi => {
            output::print_line(corral_gateway::openapi_document().trim_end())?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Completions { shell } => {
            // Into memory first: a reader that has enough is no reason to panic.
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "corral", &mut script);
            output::print_line(String::from_utf8_lossy(&script).trim_end())?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::Version => return system::version(&cli.server, cli.json).await.map(|()| ExitCode::SUCCESS),
        _ => {}
    }
    let client = Client::new(&cli.server)?;
    let json = cli.json;
    match &cli.command {
        Command::Run(args) => return Box::pin(exec::run(&client, args, json)).await,
        Command::Exec(args) => return Box::pin(exec::exec(&client, args, json)).await,
        Command::Sh(args) => return Box::pin(shell::run(&client, args)).await,
        Command::Create(args) => sandboxes::create(&client, args, json).await,
        Command::Cp(args) => copy::run(&client, args).await,
        Command::Ls(args) => sandboxes::list(&client, args, json).await,
        Command::Ps { id } => sandboxes::commands(&client, id, json).await,
        Command::Logs(args) => exec::logs(&client, args).await,
        Command::Rm { ids } => return sandboxes::each(&client, ids, sandboxes::Action::Remove, json).await,
        Command::Pause { ids } => return sandboxes::each(&client, ids, sandboxes::Action::Pause, json).await,
        Command::Resume { ids } => return sandboxes::each(&client, ids, sandboxes::Action::Resume, json).await,
        Command::Events(args) => events::events(&client, args, json).await,
        Command::Snapshot { id, name, scrub } => sandboxes::snapshot(&client, id, name, scrub, json).await,
        Command::Checkpoint { id } => sandboxes::checkpoint(&client, id, json).await,
        Command::Rollback { id, checkpoint } => sandboxes::rollback(&client, id, *checkpoint, json).await,
        Command::Fork { id, count } => return sandboxes::fork(&client, id, *count, json).await,
        Command::Stats { id } => sandboxes::stats(&client, id, json).await,
        Command::Image(command) => return images::image(&client, command, json).await,
        Command::Layer(command) => return images::layer(&client, command, json).await,
        Command::Env(command) => return environments::run(&client, command, json).await,
        Command::Key(command) => return keys::run(&client, command, json).await,
        Command::Node(_) => system::nodes(&client, json).await,
        Command::Up(_)
        | Command::Down(_)
        | Command::Doctor(_)
        | Command::Openapi
        | Command::Completions { .. }
        | Command::Version => Ok(()),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Deletes several things; goes on past failures and reports each.
async fn delete_each(client: &Client, kind: &str, names: &[String], json: bool) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for name in names {
        match crate::client::send(client.delete(&["v1", kind, name])).await {
            Ok(_) if json => output::print_json_line(&serde_json::json!({ "removed": name }))?,
            Ok(_) => output::print_line(name)?,
            Err(error) => {
                output::print_error(json, &error.context(format!("{kind} {name}")));
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}
