//! Starting a command: intent in the ledger, logs, the keeper.

use super::Command;
use crate::error::runtime_problem;
use crate::ledger::{Change, CommandRecord};
use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::command::{DEFAULT_OUTPUT_BYTES, ExecSpec, MAX_OUTPUT_BYTES, Outcome, check_argv};
use corral_api::digest::Digest;
use corral_api::ids::{CommandId, SandboxId, SessionId};
use corral_api::problem::{ErrorKind, Problem};
use corral_api::sandbox::EventKind;
use corral_keeper::protocol::{Io, Program, Step};
use corral_runtime::RuntimeError;
use corral_runtime::container::ProcessSpec;
use corral_runtime::users::{self, User};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::unix::pipe;

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A terminal's size.
#[derive(Debug, Clone, Copy)]
pub struct Terminal {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}

/// A command to start, whatever asked for it.
#[derive(Debug)]
pub(super) struct Start {
    pub id: CommandId,
    pub argv: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub cwd: Option<String>,
    pub user: Option<String>,
    pub stdin: Option<String>,
    pub open_stdin: bool,
    pub merge: bool,
    pub terminal: Option<Terminal>,
    pub shell_of: Option<SessionId>,
    pub timeout_ms: u64,
    pub max_output_bytes: u64,
    pub step_key: Option<String>,
    pub body: Digest,
}

impl Start {
    /// A command without input, limit or settings of its own.
    pub fn new(id: CommandId, argv: Vec<String>, body: Digest) -> Self {
        Self {
            id,
            argv,
            env: BTreeMap::new(),
            cwd: None,
            user: None,
            stdin: None,
            open_stdin: false,
            merge: false,
            terminal: None,
            shell_of: None,
            timeout_ms: 0,
            max_output_bytes: 0,
            step_key: None,
            body,
        }
    }

    /// What is persisted of it.
    pub fn record(&self, sandbox: &SandboxId) -> CommandRecord {
        let half = if self.max_output_bytes == 0 { DEFAULT_OUTPUT_BYTES } else { self.max_output_bytes } / 2;
        CommandRecord {
            session: self.shell_of.clone(),
            step_key: self.step_key.clone(),
            head_bytes: half.max(1),
            tail_bytes: half,
            is_shell: self.shell_of.is_some(),
            timeout_ms: self.timeout_ms,
            ..CommandRecord::new(sandbox.clone(), self.id.clone(), self.argv.clone(), self.body)
        }
    }
}

impl Core {
    /// Starts a command, or finds the one that was started under the same step key.
    ///
    /// # Errors
    /// Bad settings, a step key used for something else, a full ledger, or why it could not be started.
    pub async fn exec(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        spec: ExecSpec,
        terminal: Option<Terminal>,
    ) -> Result<Arc<Command>, Problem> {
        let begun = Instant::now();
        let start = checked(spec, terminal)?;
        // Not cancel-safe, and the caller may hang up: it goes on in a task of its own.
        let (this, of) = (self.clone(), sandbox.clone());
        let starting = tokio::spawn(async move { this.start_or_find(&of, start).await });
        let keeper = self.keepers.get(sandbox.lock().record.keeper).cloned();
        let silent = async {
            match &keeper {
                // One that is known not to answer is asked nothing: the start says so itself.
                Some(keeper) if !keeper.is_stuck() => keeper.until_stuck().await,
                _ => std::future::pending().await,
            }
        };
        let started = tokio::select! {
            started = starting => started.unwrap_or_else(|_| {
                Err(Problem::new(ErrorKind::Internal, "starting the command failed unexpectedly"))
            }),
            () = silent => {
                let text = "the keeper of this sandbox does not answer: the command may start when it does";
                Err(Problem::new(ErrorKind::OutcomeUnknown, text).sandbox(&sandbox.id))
            }
        };
        crate::metrics::Metrics::count(&self.metrics.commands, &started);
        if started.is_ok() {
            self.metrics.command_start_seconds.observe(begun.elapsed().as_secs_f64());
        }
        started
    }

    pub(super) async fn start_or_find(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        start: Start,
    ) -> Result<Arc<Command>, Problem> {
        let command = match enlist(sandbox, start.record(&sandbox.id))? {
            Enlisted::New(command) => command,
            Enlisted::Known(command) => return Ok(command),
        };
        self.start_enlisted(sandbox, &command, start).await?;
        Ok(command)
    }

    /// Starts a command of the sandbox's table; where that fails, the command says why.
    pub(super) async fn start_enlisted(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        command: &Arc<Command>,
        start: Start,
    ) -> Result<(), Problem> {
        let Err(problem) = self.start_new(sandbox, command, start).await else { return Ok(()) };
        if command.timed_out.load(std::sync::atomic::Ordering::Acquire) {
            // It was killed on its way, such as in a program file that somebody holds a lease on.
            let outcome = Outcome::TimedOut { timeout_ms: command.lock().timeout_ms };
            self.settle(sandbox, command, outcome, [0; 2], None, false);
            return Ok(());
        }
        let problem = self.judge(sandbox, problem);
        self.not_started(sandbox, command, &problem);
        Err(problem)
    }

    async fn start_new(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        command: &Arc<Command>,
        start: Start,
    ) -> Result<(), Problem> {
        let record = command.lock().clone();
        let gate = sandbox.gate.read().await;
        let (init, slot, affinity, environment, options) = {
            let inner = sandbox.lock();
            let r = &inner.record;
            (inner.init, r.slot, inner.affinity.clone(), r.environment.clone(), r.spec.clone())
        };
        let link = self.link_of(sandbox)?;
        let wanted = start.user.as_deref().unwrap_or(&environment.config.user);
        let user = find_user(init, wanted).await?;
        let program = program(&start, &environment.config, &user);
        let (name, cwd) = (start.argv.first().cloned().unwrap_or_default(), program.cwd.clone());
        let bounds = record.bounds();
        let io = match start.terminal {
            Some(Terminal { cols, rows }) => Io::Terminal { cols, rows, bounds },
            None => Io::Pipes {
                stdin: start.stdin.is_some() || start.open_stdin,
                merge: start.merge,
                control: record.is_shell,
                bounds,
            },
        };
        // The intent is in the ledger before the process can be.
        self.ballast.keep();
        let logs = make_logs(&self.log_dir(&sandbox.id), &record.id, &io)?;
        self.ledger
            .write(vec![Change::Command(Box::new(record.clone()))])
            .await
            .map_err(|e| crate::error::ledger_problem(&e))?;
        let spec = ProcessSpec {
            sandbox: sandbox.id.clone(),
            command: record.id.clone(),
            slot,
            program,
            user,
            open_files: options.limits.open_files,
            affinity,
            allow_setuid: options.allow_setuid,
            io,
        };
        let kills = self.containers.cgroups().oom_kills(sandbox.id.as_str());
        command.oom_before.store(kills, std::sync::atomic::Ordering::Relaxed);
        // The limit covers the start, too.
        self.arm_timeout(sandbox, command, record.timeout_ms);
        let started = self.containers.start(&link, spec, logs).await;
        drop(gate);
        let started = match started {
            Ok(started) => started,
            Err(error) => {
                let lost = matches!(error, RuntimeError::Gone);
                let problem = if lost && sandbox.pulse.borrow().dead {
                    Problem::new(ErrorKind::SandboxEnded, "the sandbox ended before the command could start")
                } else {
                    not_started_problem(&error, &name, &cwd)
                };
                return Err(problem);
            }
        };
        command.pid.store(started.pid, std::sync::atomic::Ordering::Relaxed);
        self.tell_started(sandbox, command);
        if let Some(fd) = started.input {
            *command.input.lock().await = sender(fd).ok();
        }
        if let Some(text) = start.stdin {
            self.feed(sandbox, command, text, !start.open_stdin);
        }
        Ok(())
    }

    /// Records that a command began, once: its end may be known before the answer to its start is.
    pub(super) fn tell_started(&self, sandbox: &Sandbox, command: &Command) {
        if !command.told_started.swap(true, std::sync::atomic::Ordering::AcqRel) {
            let what = EventKind::CommandStarted { command_id: command.id.clone() };
            self.events.record(&self.ledger, &sandbox.id, what, Vec::new());
        }
    }

    /// Kills a command with everything it started when its time is over.
    pub fn arm_timeout(self: &Arc<Self>, sandbox: &Arc<Sandbox>, command: &Arc<Command>, timeout_ms: u64) {
        if timeout_ms == 0 {
            return;
        }
        let (this, sandbox, command) = (self.clone(), sandbox.clone(), command.clone());
        let over_at = command.lock().started_ms.saturating_add(timeout_ms);
        tokio::spawn(async move {
            let left = Duration::from_millis(over_at.saturating_sub(crate::clock::now_ms()));
            if tokio::time::timeout(left, command.wait()).await.is_ok() {
                return;
            }
            command.timed_out.store(true, std::sync::atomic::Ordering::Release);
            if let Err(error) = this.containers.kill_command(&sandbox.id, &command.id) {
                tracing::error!(sandbox_id = %sandbox.id, error = %crate::error::chain(&error), "a command cannot be killed");
            }
        });
    }

    /// Writes standard input in the background, and closes it after.
    fn feed(self: &Arc<Self>, sandbox: &Arc<Sandbox>, command: &Arc<Command>, text: String, close: bool) {
        let (this, sandbox, command) = (self.clone(), sandbox.clone(), command.clone());
        tokio::spawn(async move {
            // A command that does not read all of it is no failure.
            if let Err(problem) = this.write_input(&sandbox, &command, text.as_bytes(), close).await {
                tracing::debug!(sandbox_id = %sandbox.id, %problem, "standard input was not taken");
            }
        });
    }
}

pub(super) enum Enlisted {
    New(Arc<Command>),
    Known(Arc<Command>),
}

/// Takes a command into the sandbox's table, unless its step key is known.
pub(super) fn enlist(sandbox: &Sandbox, record: CommandRecord) -> Result<Enlisted, Problem> {
    let mut inner = sandbox.lock();
    if let Some(key) = &record.step_key {
        if let Some((body, id)) = inner.steps.get(key) {
            if *body != record.body {
                let text = format!("step key {key:?} was used for another command");
                return Err(Problem::new(ErrorKind::IdempotencyMismatch, text).sandbox(&sandbox.id));
            }
            if let Some(command) = inner.commands.get(id) {
                return Ok(Enlisted::Known(command.clone()));
            }
        }
        inner.steps.insert(key.clone(), (record.body, record.id.clone()));
    }
    let command = Arc::new(Command::new(record));
    inner.commands.insert(command.id.clone(), command.clone());
    Ok(Enlisted::New(command))
}

fn checked(spec: ExecSpec, terminal: Option<Terminal>) -> Result<Start, Problem> {
    let bad = |text: String| Problem::new(ErrorKind::InvalidRequest, text);
    // How the caller waits is no part of what runs.
    let spec = ExecSpec { background: false, ..spec };
    let canonical = serde_json::to_vec(&spec).map_err(|e| bad(e.to_string()))?;
    let argv = match (spec.argv.is_empty(), spec.shell) {
        (false, None) => spec.argv,
        (true, Some(text)) => vec!["/bin/sh".to_owned(), "-c".to_owned(), text],
        _ => return Err(bad("give exactly one of argv and shell".into())),
    };
    check_argv("argv", &argv).map_err(bad)?;
    corral_api::command::check_env(&spec.env).map_err(bad)?;
    if spec.cwd.as_ref().is_some_and(|c| c.contains('\0')) {
        return Err(bad("cwd holds a NUL byte".into()));
    }
    if spec.max_output_bytes > MAX_OUTPUT_BYTES {
        return Err(bad(format!("max_output_bytes is {}: at most {MAX_OUTPUT_BYTES}", spec.max_output_bytes)));
    }
    if spec.step_key.as_ref().is_some_and(|k| k.is_empty() || k.len() > 256) {
        return Err(bad("step_key: 1–256 bytes".into()));
    }
    Ok(Start {
        env: spec.env,
        cwd: spec.cwd,
        user: spec.user,
        stdin: spec.stdin,
        open_stdin: spec.open_stdin,
        merge: spec.merge_stderr,
        terminal,
        timeout_ms: spec.timeout_ms,
        max_output_bytes: spec.max_output_bytes,
        step_key: spec.step_key,
        ..Start::new(CommandId::random(), argv, Digest::of(&canonical))
    })
}

/// Why a command could not be started, naming what was not found.
fn not_started_problem(error: &RuntimeError, program: &str, cwd: &str) -> Problem {
    /// Names from callers may be long.
    const SHOWN: usize = 200;
    let (what, name) = match error {
        RuntimeError::Start { step: Step::Exec, .. } => ("program", program),
        RuntimeError::Start { step: Step::WorkingDirectory, .. } => ("working directory", cwd),
        other => return runtime_problem(other),
    };
    let reason = error.errno().map_or_else(String::new, |e| std::io::Error::from(e).to_string());
    let name: String = name.chars().take(SHOWN).collect();
    Problem {
        message: format!("the command could not be started: {what} {name:?}: {reason}"),
        ..runtime_problem(error)
    }
}

/// Looks a user up in the sandbox, on a blocking thread unless it is root.
pub async fn find_user(init: i32, wanted: &str) -> Result<User, Problem> {
    if matches!(wanted, "" | "root" | "0") {
        return Ok(User::root());
    }
    let wanted = wanted.to_owned();
    tokio::task::spawn_blocking(move || users::find(init, &wanted))
        .await
        .map_err(|_| Problem::new(ErrorKind::Internal, "looking the user up failed"))?
        .map_err(|e| runtime_problem(&e))
}

fn program(start: &Start, config: &corral_api::image::ImageConfig, user: &User) -> Program {
    let mut env: BTreeMap<&str, &str> =
        BTreeMap::from([("PATH", DEFAULT_PATH), ("HOME", user.home.as_str()), ("USER", user.name.as_str())]);
    if start.terminal.is_some() {
        env.insert("TERM", "xterm-256color");
    }
    env.extend(config.env.iter().chain(&start.env).map(|(k, v)| (k.as_str(), v.as_str())));
    Program {
        argv: start.argv.clone(),
        env: env.iter().map(|(k, v)| format!("{k}={v}")).collect(),
        cwd: config.absolute(start.cwd.as_deref().unwrap_or_default()),
    }
}

/// Makes a command's empty log files, in the order the keeper takes them.
fn make_logs(dir: &Path, id: &CommandId, io: &Io) -> Result<Vec<OwnedFd>, Problem> {
    use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
    let failed = |e: std::io::Error| {
        tracing::error!(error = %e, "a command's log cannot be made");
        let kind = if e.raw_os_error() == Some(libc::ENOSPC) {
            ErrorKind::InsufficientStorage
        } else {
            ErrorKind::StorageError
        };
        Problem::new(kind, "the node cannot make a log for the command")
    };
    let open = |stream: &str| {
        std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            // One of an entry point may lie there from before a crash.
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(dir.join(format!("{id}.{stream}")))
    };
    let names: &[&str] = match io {
        Io::Pipes { merge: true, control: false, .. } | Io::Terminal { .. } => &["out"],
        Io::Pipes { merge: true, control: true, .. } => &["out", "ctl"],
        Io::Pipes { control: false, .. } => &["out", "err"],
        Io::Pipes { control: true, .. } => &["out", "err", "ctl"],
        Io::Worker => &[],
    };
    let mut logs = Vec::with_capacity(names.len());
    for name in names {
        let file = match open(name) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
                open(name)
            }
            other => other,
        };
        logs.push(file.map_err(failed)?.into());
    }
    Ok(logs)
}

/// Wraps the write end of standard input, or a terminal.
pub(super) fn sender(fd: OwnedFd) -> std::io::Result<pipe::Sender> {
    rustix::io::ioctl_fionbio(&fd, true)?;
    pipe::Sender::from_owned_fd_unchecked(fd)
}
