//! Commands: one that runs, or ran, in a sandbox that is live.

mod entrypoint;
mod exec;
mod finish;
mod input;
pub mod output;
mod retention;
pub mod session;
mod turn;

pub use entrypoint::Entrypoint;
pub use exec::{Terminal, find_user};
pub(crate) use finish::is_ending;
pub use retention::KeptLogs;

use crate::ledger::CommandRecord;
use crate::sandbox::Sandbox;
use corral_api::command::{CommandStatus, Outcome};
use corral_api::ids::{CommandId, SandboxId};
use corral_api::problem::Problem;
use corral_keeper::protocol::Exit;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64};
use std::sync::{Mutex, MutexGuard};
use tokio::net::unix::pipe;
use tokio::sync::watch;

/// How far a command is.
#[derive(Debug, Clone, Default)]
pub struct Progress {
    /// Bytes of standard output, standard error and control.
    pub totals: [u64; 3],
    /// How its first process ended.
    pub exit: Option<Exit>,
    /// How the command ended; set once, after `exit`.
    pub end: Option<Outcome>,
    /// It could not be started.
    pub failed: Option<Problem>,
}

/// A command.
#[derive(Debug)]
pub struct Command {
    /// Its id.
    pub id: CommandId,
    /// In which sandbox.
    pub sandbox: SandboxId,
    /// How far it is.
    pub progress: watch::Sender<Progress>,
    /// Its first process on the host; 0 until it is known.
    pub pid: AtomicI32,
    /// Kills for want of memory in its sandbox before it was started: none of these was its own.
    pub oom_before: AtomicU64,
    /// Its beginning is recorded.
    pub told_started: AtomicBool,
    /// It reached its limit and was killed for it.
    pub timed_out: AtomicBool,
    /// Write end of its standard input, or its terminal.
    pub input: tokio::sync::Mutex<Option<pipe::Sender>>,
    record: Mutex<CommandRecord>,
}

impl Command {
    /// A command from its record.
    pub fn new(record: CommandRecord) -> Self {
        let totals = [record.totals[0], record.totals[1], 0];
        let progress = Progress { totals, end: record.end.clone(), ..Progress::default() };
        Self {
            id: record.id.clone(),
            sandbox: record.sandbox.clone(),
            progress: watch::channel(progress).0,
            pid: AtomicI32::new(0),
            oom_before: AtomicU64::new(0),
            // One that is read from the ledger was told of before.
            told_started: AtomicBool::new(record.end.is_some()),
            timed_out: AtomicBool::new(false),
            input: tokio::sync::Mutex::new(None),
            record: Mutex::new(record),
        }
    }

    /// What is persisted.
    pub fn lock(&self) -> MutexGuard<'_, CommandRecord> {
        self.record.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// As callers see it now. What a session's command has written is known to its shell: see [`Sandbox::status_of`].
    pub fn status(&self) -> CommandStatus {
        let record = self.lock().clone();
        record.status(self.totals(&record))
    }

    /// As [`Self::status`], for a command in this shell.
    fn status_in(&self, shell: &Self) -> CommandStatus {
        let mut record = self.lock().clone();
        if let Some(within) = record.within.as_ref().filter(|_| record.end.is_none()) {
            let [out, err, _] = shell.progress.borrow().totals;
            record.totals = [out.saturating_sub(within.from[0]), err.saturating_sub(within.from[1])];
        }
        record.status(self.totals(&record))
    }

    /// Bytes of its own standard output and error: at its end when it has ended, so far while it runs.
    pub fn totals(&self, record: &CommandRecord) -> [u64; 2] {
        let [out, err, _] = self.progress.borrow().totals;
        // Children that outlive it may still write: readable, and counted, but not part of its result.
        [out.max(record.totals[0]), err.max(record.totals[1])]
    }

    /// Whether it still runs.
    pub fn is_running(&self) -> bool {
        let progress = self.progress.borrow();
        progress.end.is_none() && progress.failed.is_none()
    }

    /// Waits until it has ended, or is known never to have started.
    pub async fn ended(&self) {
        let mut progress = self.progress.subscribe();
        // The sender lives as long as the command.
        let _seen = progress.wait_for(|p| p.end.is_some() || p.failed.is_some()).await;
    }

    /// Waits until it has ended, and tells how.
    ///
    /// # Errors
    /// When it could not be started.
    pub async fn wait(&self) -> Result<Outcome, Problem> {
        self.ended().await;
        let progress = self.progress.borrow();
        match &progress.failed {
            Some(problem) => Err(problem.clone()),
            None => Ok(progress.end.clone().unwrap_or(Outcome::OutcomeUnknown)),
        }
    }
}

impl Sandbox {
    /// A command of this sandbox as callers see it now.
    pub fn status_of(&self, command: &Command) -> CommandStatus {
        let shell = command.lock().within.as_ref().map(|within| within.shell.clone());
        match shell.and_then(|id| self.command(&id)) {
            Some(shell) => command.status_in(&shell),
            None => command.status(),
        }
    }
}
