//! `corral-lazy`: the holder of `ROOT/lazy` and its server. See the library's page.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use corral_lazy::options::{HELP, Options};
use corral_lazy::server::Handed;
use corral_lazy::{holder, server};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (command, rest) = words.split_first().map_or(("", &[][..]), |(first, rest)| (first.as_str(), rest));
    let ended = match (command, rest) {
        ("hold", [resume, numbers, rest @ ..]) if resume == "--resume" => resume_holding(numbers, rest),
        ("hold", [from, word, rest @ ..]) if from == "--from" => go_on(word, rest),
        ("hold", rest) if !rest.is_empty() => hold(rest),
        ("serve", [fds, numbers, holder, pid, rest @ ..]) if fds == "--fds" && holder == "--holder" => {
            serve(numbers, pid, rest)
        }
        ("probe", rest) => probe(rest),
        _ => {
            eprintln!("usage: corral-lazy hold --root DIR --store URL --socket PATH [options]\n{HELP}");
            std::process::exit(2);
        }
    };
    if let Err(error) = ended {
        eprintln!("corral-lazy: {error:#}");
        std::process::exit(1);
    }
}

fn hold(words: &[String]) -> Result<()> {
    Ok(holder::hold(Options::parse(words)?)?)
}

fn go_on(word: &str, words: &[String]) -> Result<()> {
    Ok(holder::go_on(Options::parse(words)?, word)?)
}

fn probe(words: &[String]) -> Result<()> {
    println!("{}", holder::probe_line(words)?);
    Ok(())
}

fn resume_holding(numbers: &str, words: &[String]) -> Result<()> {
    Ok(holder::resume(Options::parse(words)?, numbers)?)
}

fn serve(numbers: &str, pid: &str, words: &[String]) -> Result<()> {
    rustix::thread::set_name(c"corral-lazy").context("its name")?;
    let filter = tracing_subscriber::EnvFilter::try_from_env("CORRAL_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    let options = Options::parse(words)?;
    Ok(server::run(options, Handed::take(numbers)?, pid.parse().context("--holder")?)?)
}
