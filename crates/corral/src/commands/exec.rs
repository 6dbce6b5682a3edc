//! Commands: run, exec and their output.

use super::sandboxes;
use super::transfer::Upload;
use crate::cli::{ExecArgs, LogsArgs, RunArgs};
use crate::client::{ApiError, Client, Lines, fetch, send};
use crate::output::{print_error, print_json, print_line, printable, tell};
use anyhow::Context as _;
use corral_api::command::{CommandStatus, ExecEvent, ExecResult, ExecSpec, Outcome, SignalRequest, StreamName};
use corral_api::ids::CommandId;
use corral_api::query::{ExecQuery, OutputQuery, StdinQuery};
use corral_api::sandbox::{EndStatus, SandboxStatus};
use serde::Serialize;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Exit code of a client that was interrupted: 128 + SIGINT.
const INTERRUPTED: u8 = 130;
/// How long an interrupted `run` waits for the create on its way, to remove what it makes.
const CREATE_GRACE: Duration = Duration::from_secs(10);

/// SIGINT or SIGTERM.
struct Interrupts {
    int: Signal,
    term: Signal,
}

impl Interrupts {
    fn new() -> anyhow::Result<Self> {
        let on = |kind| signal(kind).context("cannot wait for signals");
        Ok(Self { int: on(SignalKind::interrupt())?, term: on(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.int.recv() => {}
            _ = self.term.recv() => {}
        }
    }
}

#[derive(Debug, Serialize)]
struct RunResult {
    sandbox_id: String,
    #[serde(flatten)]
    result: ExecResult,
}

/// `corral run`.
pub async fn run(client: &Client, args: &RunArgs, json: bool) -> anyhow::Result<ExitCode> {
    let mut interrupts = Interrupts::new()?;
    let spec = sandboxes::spec(&args.environment, &args.sandbox);
    let mut creating = Box::pin(sandboxes::make(client, &spec, json));
    let (made, interrupted) = tokio::select! {
        made = &mut creating => (made, false),
        () = interrupts.next() => match tokio::time::timeout(CREATE_GRACE, creating).await {
            Ok(made) => (made, true),
            Err(_) => return Ok(INTERRUPTED.into()),
        },
    };
    let id = made?.id.to_string();
    let exec = ExecSpec {
        argv: args.argv.clone(),
        cwd: args.command.cwd.clone(),
        user: args.command.user.clone(),
        timeout_ms: args.command.timeout.unwrap_or_default(),
        ..ExecSpec::default()
    };
    let work = async {
        if json {
            let result = fetch::<ExecResult>(client.post(&["v1", "sandboxes", &id, "exec"]).json(&exec)).await?;
            let code = exit_code(result.exit_code);
            print_json(&RunResult { sandbox_id: id.clone(), result })?;
            return Ok(code);
        }
        stream(client, &id, &exec, None).await
    };
    let outcome = if interrupted {
        Ok(INTERRUPTED.into())
    } else {
        tokio::select! {
            outcome = work => outcome,
            () = interrupts.next() => Ok(INTERRUPTED.into()),
        }
    };
    if args.keep {
        tell(format_args!("corral: kept sandbox {id}\n"));
    } else if let Err(error) = send(client.delete(&["v1", "sandboxes", &id])).await {
        print_error(json, &error.context(format!("sandbox {id} could not be removed")));
    }
    outcome
}

/// `corral exec`.
pub async fn exec(client: &Client, args: &ExecArgs, json: bool) -> anyhow::Result<ExitCode> {
    let spec = ExecSpec {
        argv: args.argv.clone(),
        env: args.env.iter().cloned().collect(),
        cwd: args.command.cwd.clone(),
        user: args.command.user.clone(),
        timeout_ms: args.command.timeout.unwrap_or_default(),
        step_key: args.step_key.clone(),
        background: args.detach,
        open_stdin: args.interactive,
        ..ExecSpec::default()
    };
    let request = client.post(&["v1", "sandboxes", &args.id, "exec"]).json(&spec);
    if args.detach {
        let command: CommandStatus = fetch(request).await?;
        if json {
            print_json(&command)?;
        } else {
            print_line(command.id.as_str())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if json && !args.interactive {
        let result: ExecResult = fetch(request).await?;
        let code = exit_code(result.exit_code);
        print_json(&result)?;
        return Ok(code);
    }
    let interrupts = Interrupts::new()?;
    stream(client, &args.id, &spec, Some(interrupts)).await
}

/// Runs a command and passes its output on. The first interrupt goes to the command, the second ends the client.
async fn stream(
    client: &Client,
    sandbox: &str,
    spec: &ExecSpec,
    mut interrupts: Option<Interrupts>,
) -> anyhow::Result<ExitCode> {
    let path = ["v1", "sandboxes", sandbox, "exec"];
    let response = tokio::select! {
        response = send(client.post(&path).query(&ExecQuery { stream: true }).json(spec)) => response?,
        () = wait(&mut interrupts) => return Ok(INTERRUPTED.into()),
    };
    let mut lines = Lines::new(response);
    let mut command: Option<CommandId> = None;
    let mut feeding: Option<tokio::task::JoinHandle<()>> = None;
    let mut interrupted = false;
    let code = loop {
        let line = tokio::select! {
            line = lines.next() => line?.context("the output broke off before the command ended")?,
            () = wait(&mut interrupts) => {
                match &command {
                    // Not waited for: a second one must end this client whatever becomes of the first.
                    Some(command) if !interrupted => {
                        tokio::spawn(interrupt(client.clone(), sandbox.to_owned(), command.clone()));
                    }
                    _ => break INTERRUPTED.into(),
                }
                interrupted = true;
                continue;
            }
        };
        if line.is_empty() {
            continue;
        }
        match serde_json::from_slice(&line).context("the server's answer cannot be read")? {
            ExecEvent::Started { command_id } => {
                if spec.open_stdin {
                    feeding = Some(tokio::spawn(feed(client.clone(), sandbox.to_owned(), command_id.clone())));
                }
                command = Some(command_id);
            }
            ExecEvent::Output { stream, base64, .. } => {
                let bytes = data_encoding::BASE64.decode(base64.as_bytes()).context("the output cannot be read")?;
                write_to(stream, &bytes)?;
            }
            ExecEvent::Ended { command } => {
                let end = command.end.context("the server said ended without an outcome")?;
                if let Some(why) = why_without_status(client, sandbox, &end).await {
                    tell(format_args!("corral: {}\n", printable(&why)));
                }
                break exit_code(end.shell_status());
            }
            ExecEvent::Failed { problem } => return Err(ApiError::of(problem).into()),
        }
    };
    if let Some(feeding) = feeding {
        feeding.abort();
    }
    Ok(code)
}

/// The end of a sandbox that is ending; nothing where it takes long.
async fn end_of(client: &Client, sandbox: &str) -> Option<EndStatus> {
    const TRIES: u32 = 50;
    const PAUSE: Duration = Duration::from_millis(100);
    for _ in 0..TRIES {
        let status = fetch::<SandboxStatus>(client.get(&["v1", "sandboxes", sandbox])).await.ok()?;
        if status.end.is_some() {
            return status.end;
        }
        tokio::time::sleep(PAUSE).await;
    }
    None
}

/// Why a command that is over has no status of its own, for a person; nothing where it has one.
async fn why_without_status(client: &Client, sandbox: &str, outcome: &Outcome) -> Option<String> {
    match outcome {
        Outcome::Exited { .. } | Outcome::Signaled { .. } | Outcome::TimedOut { .. } => None,
        Outcome::SandboxEnded => {
            let why = end_of(client, sandbox).await.map(|end| format!(": {}", sandboxes::why(&end)));
            Some(format!("the sandbox ended before the command did{}", why.unwrap_or_default()))
        }
        Outcome::RolledBack => Some("the sandbox was rolled back before the command ended".to_owned()),
        Outcome::OutcomeUnknown => {
            Some("what became of the command cannot be known after a crash; it was not run again".to_owned())
        }
        Outcome::NotStarted { message } => Some(format!("the command could not be started: {message}")),
    }
}

async fn wait(interrupts: &mut Option<Interrupts>) {
    match interrupts {
        Some(interrupts) => interrupts.next().await,
        None => std::future::pending().await,
    }
}

async fn interrupt(client: Client, sandbox: String, command: CommandId) {
    let path = ["v1", "sandboxes", &sandbox, "commands", command.as_str(), "signal"];
    let body = SignalRequest { signal: "SIGINT".into(), tree: true };
    if let Err(error) = send(client.post(&path).json(&body)).await {
        print_error(false, &error.context("the command could not be interrupted"));
    }
}

/// Streams standard input to a command and closes it at its end.
async fn feed(client: Client, sandbox: String, command: CommandId) {
    let input = Upload::stdin();
    let path = ["v1", "sandboxes", &sandbox, "commands", command.as_str(), "stdin"];
    let request = client.post(&path).query(&StdinQuery { close: true }).body(input.body);
    if let Err(error) = input.source.settle(send(request).await) {
        // A command that ends before its input does is not an error.
        let ended = error.downcast_ref::<ApiError>().is_some_and(|e| matches!(e.status, 404 | 409 | 410));
        if !ended {
            print_error(false, &error.context("standard input could not be passed on"));
        }
    }
}

fn write_to(stream: StreamName, bytes: &[u8]) -> anyhow::Result<()> {
    let written = match stream {
        StreamName::Stdout => {
            let mut out = std::io::stdout().lock();
            out.write_all(bytes).and_then(|()| out.flush())
        }
        StreamName::Stderr => std::io::stderr().lock().write_all(bytes),
    };
    written.context("cannot pass the output on")
}

/// An exit status as this process can give it.
pub fn exit_code(status: i32) -> ExitCode {
    // The low byte, as the kernel does for any process.
    ExitCode::from((status & 0xff) as u8)
}

/// `corral logs`.
pub async fn logs(client: &Client, args: &LogsArgs) -> anyhow::Result<()> {
    let one = |stream| copy_output(client, args, stream);
    match args.stream {
        Some(stream) => one(stream).await,
        None if args.follow => tokio::try_join!(one(StreamName::Stdout), one(StreamName::Stderr)).map(drop),
        None => {
            one(StreamName::Stdout).await?;
            one(StreamName::Stderr).await
        }
    }
}

async fn copy_output(client: &Client, args: &LogsArgs, stream: StreamName) -> anyhow::Result<()> {
    let path = ["v1", "sandboxes", &args.id, "commands", &args.command, "output"];
    let query = OutputQuery { stream: Some(stream), follow: args.follow, ..OutputQuery::default() };
    let mut response = send(client.get(&path).query(&query)).await?;
    let header = |name| response.headers().get(name).and_then(|v| v.to_str().ok());
    if header("corral-truncated") == Some("true") {
        let to = header("corral-dropped-to").unwrap_or("?");
        tell(format_args!("corral: a part before offset {to} was dropped\n"));
    }
    // An explicit stream goes to standard output, so that it can be piped.
    let target = if args.stream.is_some() { StreamName::Stdout } else { stream };
    while let Some(chunk) = response.chunk().await.context("the output broke off")? {
        write_to(target, &chunk)?;
    }
    Ok(())
}
