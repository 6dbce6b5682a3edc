//! Shell sessions: a shell that lives between commands, so that directory, variables and functions stay.
//!
//! The shell reads its commands from a pipe and tells each one's status on a control pipe that the commands themselves
//! do not get. The keeper reads that pipe before the others' rest, so the output of a command is the stretch of the
//! shell's logs between two statuses: no marks in the output, nothing to forge in it.

use super::Command;
use super::exec::{Enlisted, Start, enlist};
use crate::ledger::{Change, CommandRecord, DEFAULT_BOUNDS};
use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::command::{Outcome, SessionRun, SessionSpec, SessionStatus, Usage};
use corral_api::digest::Digest;
use corral_api::ids::{CommandId, SessionId};
use corral_api::problem::{ErrorKind, Problem};
use corral_api::sandbox::EventKind;
use corral_runtime::cgroup;
use corral_runtime::log_reader::LogReader;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A session.
#[derive(Debug)]
pub struct Session {
    /// Its id.
    pub id: SessionId,
    /// Its shell.
    pub shell: Arc<Command>,
    /// One command at a time.
    turn: tokio::sync::Mutex<()>,
}

impl Session {
    /// A session around its shell.
    pub fn new(id: SessionId, shell: Arc<Command>) -> Self {
        Self { id, shell, turn: tokio::sync::Mutex::new(()) }
    }

    /// As callers see it.
    pub fn status(&self) -> SessionStatus {
        SessionStatus { id: self.id.clone(), command_id: self.shell.id.clone(), open: self.shell.is_running() }
    }
}

impl Core {
    /// Opens a session.
    ///
    /// # Errors
    /// When no shell can be started.
    pub async fn open_session(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        spec: SessionSpec,
    ) -> Result<Arc<Session>, Problem> {
        corral_api::command::check_env(&spec.env).map_err(|t| Problem::new(ErrorKind::InvalidRequest, t))?;
        let id = SessionId::random();
        let shells = spec.shell.clone().map_or_else(|| vec!["/bin/bash".to_owned(), "/bin/sh".to_owned()], |s| vec![s]);
        let mut last = Problem::new(ErrorKind::CommandNotStarted, "no shell");
        for shell in shells {
            let start = Start {
                env: spec.env.clone(),
                cwd: spec.cwd.clone(),
                user: spec.user.clone(),
                open_stdin: true,
                shell_of: Some(id.clone()),
                ..Start::new(CommandId::random(), vec![shell], Digest::of(id.as_str().as_bytes()))
            };
            let (this, of) = (self.clone(), sandbox.clone());
            let started = tokio::spawn(async move { this.start_or_find(&of, start).await })
                .await
                .unwrap_or_else(|_| Err(Problem::new(ErrorKind::Internal, "starting the shell failed unexpectedly")));
            match started {
                Ok(command) => {
                    let session = Arc::new(Session::new(id.clone(), command));
                    sandbox.lock().sessions.insert(id, session.clone());
                    return Ok(session);
                }
                Err(problem) if problem.kind == ErrorKind::CommandNotStarted => last = problem,
                Err(problem) => return Err(problem),
            }
        }
        Err(last)
    }

    /// Runs a command in a session and waits for its end.
    ///
    /// # Errors
    /// When the session is closed, or the step key was used for something else.
    pub async fn run_in_session(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        session: &Arc<Session>,
        run: SessionRun,
    ) -> Result<Arc<Command>, Problem> {
        if run.command.contains('\0') {
            return Err(Problem::new(ErrorKind::InvalidRequest, "command holds a NUL byte"));
        }
        let body = serde_json::to_vec(&(&session.id, &run)).map(|b| Digest::of(&b));
        let body = body.map_err(|e| Problem::new(ErrorKind::InvalidRequest, e.to_string()))?;
        // Not cancel-safe, and the caller may hang up: it goes on in a task of its own.
        let (this, of, within) = (self.clone(), sandbox.clone(), session.clone());
        tokio::spawn(async move { this.run_turn(&of, &within, run, body).await })
            .await
            .unwrap_or_else(|_| Err(Problem::new(ErrorKind::Internal, "the session's command failed unexpectedly")))
    }

    async fn run_turn(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        session: &Arc<Session>,
        run: SessionRun,
        body: Digest,
    ) -> Result<Arc<Command>, Problem> {
        let _turn = session.turn.lock().await;
        let before = session.shell.progress.borrow().totals;
        let record = CommandRecord {
            session: Some(session.id.clone()),
            step_key: run.step_key.clone(),
            within: Some(crate::ledger::Within { shell: session.shell.id.clone(), from: [before[0], before[1]] }),
            timeout_ms: run.timeout_ms,
            ..CommandRecord::new(sandbox.id.clone(), CommandId::random(), vec![run.command.clone()], body)
        };
        let command = match enlist(sandbox, record.clone())? {
            Enlisted::New(command) => command,
            Enlisted::Known(command) => {
                command.wait().await?;
                return Ok(command);
            }
        };
        if !session.shell.is_running() {
            let problem = Problem::new(ErrorKind::Conflict, "the session is closed: its shell has ended");
            self.not_started(sandbox, &command, &problem);
            return Err(problem.sandbox(&sandbox.id));
        }
        self.ballast.keep();
        if let Err(error) = self.ledger.write(vec![Change::Command(Box::new(record))]).await {
            let problem = crate::error::ledger_problem(&error);
            self.not_started(sandbox, &command, &problem);
            return Err(problem.sandbox(&sandbox.id));
        }
        let what = EventKind::CommandStarted { command_id: command.id.clone() };
        self.events.record(&self.ledger, &sandbox.id, what, Vec::new());
        if let Err(problem) = self.write_input(sandbox, &session.shell, script(&run.command).as_bytes(), false).await {
            tracing::debug!(sandbox_id = %sandbox.id, %problem, "a session's shell takes no input");
        }
        let outcome = self.wait_for_status(sandbox, session, before[2], run.timeout_ms).await;
        let after = session.shell.progress.borrow().totals;
        let started = command.lock().started_ms;
        let usage = Usage { wall_ms: crate::clock::now_ms().saturating_sub(started), ..Usage::default() };
        self.settle(sandbox, &command, outcome, [after[0] - before[0], after[1] - before[1]], Some(usage), false);
        Ok(command)
    }

    /// Waits until the shell tells a status, ends, or the time is over.
    async fn wait_for_status(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        session: &Session,
        told: u64,
        timeout_ms: u64,
    ) -> Outcome {
        /// A shell whose children were killed tells so at once, unless it is busy itself.
        const GRACE: Duration = Duration::from_secs(1);
        let mut progress = session.shell.progress.subscribe();
        let mut status = async |limit: Option<Duration>| {
            let seen = progress.wait_for(|p| p.totals[2] > told || p.end.is_some());
            match limit {
                Some(limit) => tokio::time::timeout(limit, seen).await.is_ok(),
                None => seen.await.is_ok(),
            }
        };
        let limit = (timeout_ms > 0).then(|| Duration::from_millis(timeout_ms));
        if !status(limit).await {
            let shell = session.shell.pid.load(Ordering::Relaxed);
            for pid in cgroup::processes(self.containers.cgroups(), sandbox.id.as_str(), session.shell.id.as_str()) {
                if pid != shell {
                    // One that ended meanwhile needs no signal.
                    corral_sys::process::kill(pid, libc::SIGKILL).unwrap_or(());
                }
            }
            if !status(Some(GRACE)).await {
                if let Err(error) = self.containers.kill_command(&sandbox.id, &session.shell.id) {
                    tracing::error!(sandbox_id = %sandbox.id, error = %crate::error::chain(&error), "a session cannot be killed");
                }
                session.shell.ended().await;
            }
            return Outcome::TimedOut { timeout_ms };
        }
        let end = session.shell.progress.borrow().end.clone();
        match self.read_status(session, told) {
            Some(code) => Outcome::Exited { code },
            None => end.unwrap_or(Outcome::OutcomeUnknown),
        }
    }

    fn read_status(&self, session: &Session, told: u64) -> Option<i32> {
        let path = self.log_dir(&session.shell.sandbox).join(format!("{}.ctl", session.shell.id));
        let log = LogReader::open(&path, DEFAULT_BOUNDS).ok()?;
        let total = session.shell.progress.borrow().totals[2];
        let bytes = log.read(told, 64, total).ok()?.bytes;
        std::str::from_utf8(&bytes).ok()?.lines().next()?.trim().parse().ok()
    }

    /// Closes a session and kills what it started.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn close_session(self: &Arc<Self>, sandbox: &Arc<Sandbox>, session: &Session) -> Result<(), Problem> {
        self.containers.kill_command(&sandbox.id, &session.shell.id).map_err(|e| crate::error::runtime_problem(&e))?;
        session.shell.ended().await;
        sandbox.lock().sessions.remove(&session.id);
        Ok(())
    }
}

/// What the shell is sent for a command. Standard input is empty and the control pipe closed for it.
fn script(command: &str) -> String {
    let control = corral_keeper::CONTROL_FD;
    let quoted = command.replace('\'', "'\\''");
    // `command` keeps a syntax error from ending a POSIX shell, for which eval is a special built-in.
    format!("{{ command eval '{quoted}\n'; }} {control}>&- </dev/null\nprintf '%d\\n' \"$?\" >&{control}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_survive() {
        let text = script("echo 'a b' \"c\"");
        assert!(text.starts_with("{ command eval 'echo '\\''a b'\\'' \"c\"\n'; } 9>&- </dev/null\n"), "{text}");
    }
}
