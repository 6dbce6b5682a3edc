//! One command of a shell session.
//!
//! The shell reads its commands from a pipe and reports each one's beginning and status, under the command's id, on a
//! control pipe that the commands themselves do not get. The keeper reads that pipe after what the others hold, so the
//! output of a command is the stretch of the shell's logs up to its report: no marks in the output. What else is written
//! to the control pipe counts for nothing.

use super::Command;
use super::exec::{Enlisted, enlist};
use super::session::Session;
use crate::ledger::{Change, CommandRecord, DEFAULT_BOUNDS, Within};
use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::command::{Outcome, SessionRun, Usage};
use corral_api::digest::Digest;
use corral_api::ids::CommandId;
use corral_api::problem::{ErrorKind, Problem};
use corral_runtime::cgroup;
use corral_runtime::log_reader::LogReader;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What the shell says of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Report {
    /// It has read all of it and begins.
    Begun,
    /// Its status.
    Ended(i32),
}

impl Core {
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
        let [out, err, control] = session.shell.progress.borrow().totals;
        let record = CommandRecord {
            session: Some(session.id.clone()),
            step_key: run.step_key.clone(),
            within: Some(Within { shell: session.shell.id.clone(), from: [out, err], control }),
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
        self.tell_started(sandbox, &command);
        let script = script(&command.id, &run.command);
        if let Err(problem) = self.write_input(sandbox, &session.shell, script.as_bytes(), false).await {
            tracing::debug!(sandbox_id = %sandbox.id, %problem, "a session's shell takes no input");
        }
        self.finish_turn(sandbox, session, &command, run.timeout_ms).await;
        Ok(command)
    }

    /// Takes over a command that was sent to a shell before this node was restarted. Where the shell does not have all
    /// of it, what became of it cannot be known; the shell is ended then, since the next command could be taken for a
    /// part of it.
    pub(crate) fn resume_turn(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        session: &Arc<Session>,
        command: &Arc<Command>,
    ) {
        /// A shell with nothing else to do begins at once.
        const BEGINS_WITHIN: Duration = Duration::from_secs(10);
        // Taken before anything is served: the next command waits for this one.
        let Ok(turn) = session.turn.clone().try_lock_owned() else { return };
        let (this, sandbox, session, command) = (self.clone(), sandbox.clone(), session.clone(), command.clone());
        tokio::spawn(async move {
            let _turn = turn;
            let begun = this.reported(&session, &command, |report| report.is_some());
            if tokio::time::timeout(BEGINS_WITHIN, begun).await.is_err() {
                this.end_shell(&sandbox, &session).await;
                let totals = command.lock().totals;
                return this.settle(&sandbox, &command, Outcome::OutcomeUnknown, totals, None, false);
            }
            let (limit, started) = {
                let record = command.lock();
                (record.timeout_ms, record.started_ms)
            };
            let over = crate::clock::now_ms().saturating_sub(started);
            // A limit that has passed meanwhile is a short one, not none.
            let left = if limit == 0 { 0 } else { limit.saturating_sub(over).max(1) };
            this.finish_turn(&sandbox, &session, &command, left).await;
        });
    }

    /// Waits for a command's end and records it.
    async fn finish_turn(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        session: &Session,
        command: &Arc<Command>,
        limit_ms: u64,
    ) {
        let outcome = self.outcome_of_turn(sandbox, session, command, limit_ms).await;
        let [out, err, _] = session.shell.progress.borrow().totals;
        let (from, started) = {
            let record = command.lock();
            (record.within.as_ref().map_or([out, err], |within| within.from), record.started_ms)
        };
        let usage = Usage { wall_ms: crate::clock::now_ms().saturating_sub(started), ..Usage::default() };
        let totals = [out.saturating_sub(from[0]), err.saturating_sub(from[1])];
        self.settle(sandbox, command, outcome, totals, Some(usage), false);
    }

    async fn outcome_of_turn(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        session: &Session,
        command: &Command,
        limit_ms: u64,
    ) -> Outcome {
        /// A shell whose children were killed tells so at once, unless it is busy itself.
        const GRACE: Duration = Duration::from_secs(1);
        let ended = || self.reported(session, command, |report| matches!(report, Some(Report::Ended(_))));
        let report = if limit_ms == 0 {
            ended().await
        } else if let Ok(report) = tokio::time::timeout(Duration::from_millis(limit_ms), ended()).await {
            report
        } else {
            self.kill_children(sandbox, session);
            if tokio::time::timeout(GRACE, ended()).await.is_err() {
                self.end_shell(sandbox, session).await;
            }
            return Outcome::TimedOut { timeout_ms: command.lock().timeout_ms };
        };
        match report {
            Some(Report::Ended(code)) => Outcome::Exited { code },
            _ => session.shell.progress.borrow().end.clone().unwrap_or(Outcome::OutcomeUnknown),
        }
    }

    /// Waits until what the shell says of a command is enough, or the shell ends; what it said.
    async fn reported(
        &self,
        session: &Session,
        command: &Command,
        is_enough: impl Fn(Option<Report>) -> bool,
    ) -> Option<Report> {
        let mut progress = session.shell.progress.subscribe();
        let (mut report, mut read) = (None, 0);
        loop {
            let (told, over) = {
                let seen = progress.borrow_and_update();
                (seen.totals[2], seen.end.is_some())
            };
            // Output changes the progress too, and far more often.
            if told > read {
                report = self.read_report(session, command, told);
                read = told;
            }
            if over || is_enough(report) {
                return report;
            }
            // The sender lives as long as the shell's command, which the session holds.
            progress.changed().await.ok()?;
        }
    }

    /// The last that the shell said of a command, among what it said lately.
    fn read_report(&self, session: &Session, command: &Command, told: u64) -> Option<Report> {
        /// Far more than a command's reports take: what else is in it was not written by the shell.
        const LATELY: u64 = 64 << 10;
        let from = command.lock().within.as_ref().map_or(0, |within| within.control).max(told.saturating_sub(LATELY));
        if from >= told {
            return None;
        }
        let path = self.log_dir(&session.shell.sandbox).join(format!("{}.ctl", session.shell.id));
        let log = LogReader::open(&path, DEFAULT_BOUNDS).ok()?;
        let mut text = Vec::new();
        let mut at = from;
        while at < told {
            let chunk = log.read(at, LATELY as usize, told).ok()?;
            if chunk.bytes.is_empty() {
                break;
            }
            at = chunk.offset + chunk.bytes.len() as u64;
            text.extend(chunk.bytes);
        }
        last_report(&String::from_utf8_lossy(&text), &command.id)
    }

    fn kill_children(&self, sandbox: &Sandbox, session: &Session) {
        let shell = session.shell.pid.load(Ordering::Relaxed);
        for pid in cgroup::processes(self.containers.cgroups(), sandbox.id.as_str(), session.shell.id.as_str()) {
            if pid != shell {
                // One that ended meanwhile needs no signal.
                corral_sys::process::kill(pid, libc::SIGKILL).unwrap_or(());
            }
        }
    }

    /// Ends a shell that does not obey.
    async fn end_shell(&self, sandbox: &Sandbox, session: &Session) {
        if let Err(error) = self.kill_shell(sandbox, session).await {
            tracing::error!(sandbox_id = %sandbox.id, error = %crate::error::chain(&error), "a session cannot be killed");
        }
    }
}

/// The last complete line about this command.
fn last_report(text: &str, command: &CommandId) -> Option<Report> {
    let complete = &text[..text.rfind('\n')?];
    complete.lines().rev().find_map(|line| match line.strip_prefix(command.as_str())?.trim() {
        "begun" => Some(Report::Begun),
        code => code.parse().ok().map(Report::Ended),
    })
}

/// What the shell is sent for a command: one compound, which it reads whole before it begins. Standard input is empty
/// and the control pipe closed for the command.
fn script(id: &CommandId, command: &str) -> String {
    let control = corral_keeper::CONTROL_FD;
    let quoted = command.replace('\'', "'\\''");
    // `command` keeps a syntax error from ending a POSIX shell, for which eval is a special built-in, and finds the
    // built-in printf behind a function of that name. The empty line is for bash: after text that ends within a quote
    // it does not know the first word as a reserved one.
    format!(
        "\n{{ command printf '{id} begun\\n' >&{control}\n{{ command eval '{quoted}\n'; }} {control}>&- </dev/null\n\
         command printf '{id} %d\\n' \"$?\" >&{control}; }}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> CommandId {
        "c0123456789abcdef".parse().unwrap()
    }

    #[test]
    fn quotes_survive() {
        let text = script(&id(), "echo 'a b' \"c\"");
        assert!(text.contains("{ command eval 'echo '\\''a b'\\'' \"c\"\n'; } 9>&- </dev/null\n"), "{text}");
    }

    #[test]
    fn only_lines_of_this_command_count() {
        let of = |text: &str| last_report(text, &id());
        assert_eq!(of(""), None);
        assert_eq!(of("0\n7\nc0000000000000000 3\n"), None);
        assert_eq!(of("c0123456789abcdef begun\n0\n"), Some(Report::Begun));
        assert_eq!(of("c0123456789abcdef begun\nc0123456789abcdef 5\nnoise"), Some(Report::Ended(5)));
        assert_eq!(of("c0123456789abcdef begun\nc0123456789abcdef 5"), Some(Report::Begun), "not all of it is here");
    }
}
