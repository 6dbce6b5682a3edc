//! The end of a command: what became of it, recorded before the keeper may forget it.

use super::input::name_of;
use super::{Command, Progress};
use crate::ledger::{Change, CommandRecord};
use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::command::{Outcome, Usage};
use corral_api::problem::Problem;
use corral_api::sandbox::EventKind;
use corral_keeper::protocol::{CommandNotice, Exit, Request};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Core {
    /// Takes in what the keeper says of a command.
    pub fn command_noticed(self: &Arc<Self>, sandbox: &Arc<Sandbox>, command: &Arc<Command>, notice: &CommandNotice) {
        command.pid.store(notice.pid, Ordering::Relaxed);
        command.progress.send_modify(|p| {
            p.totals = notice.totals;
            p.exit = notice.exit;
        });
        if let Some(exit) = notice.exit
            && command.is_running()
        {
            self.command_ended(sandbox, command, exit);
        } else if notice.exit.is_some() {
            // Its survivors wrote.
            let [out, err, _] = notice.totals;
            let grown = CommandRecord { totals: [out, err], ..command.lock().clone() };
            self.retain_output(sandbox, &grown);
        }
    }

    fn command_ended(self: &Arc<Self>, sandbox: &Arc<Sandbox>, command: &Arc<Command>, exit: Exit) {
        let outcome = self.outcome_of(sandbox, command, exit);
        let now = crate::clock::now_ms();
        let usage = Usage {
            cpu_ms: exit.cpu_us / 1000,
            peak_memory_bytes: exit.peak_rss_kib << 10,
            wall_ms: now.saturating_sub(command.lock().started_ms),
        };
        let totals = command.progress.borrow().totals;
        self.settle(sandbox, command, outcome, [totals[0], totals[1]], Some(usage), true);
    }

    /// Sets a command's end, tells it, and records it; then the keeper may forget it.
    pub(crate) fn settle(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        command: &Arc<Command>,
        outcome: Outcome,
        totals: [u64; 2],
        usage: Option<Usage>,
        acknowledge: bool,
    ) {
        let record = {
            let mut record = command.lock();
            record.end = Some(outcome.clone());
            record.ended_ms = Some(crate::clock::now_ms());
            record.totals = totals;
            record.usage = usage;
            record.clone()
        };
        if !matches!(outcome, Outcome::NotStarted { .. }) {
            self.tell_started(sandbox, command);
        }
        let what = EventKind::CommandEnded { command_id: command.id.clone(), outcome: outcome.clone() };
        self.events.record(&self.ledger, &sandbox.id, what, vec![Change::Command(Box::new(record))]);
        command.progress.send_modify(|p: &mut Progress| {
            p.end = Some(outcome);
            p.totals[..2].copy_from_slice(&totals);
        });
        let ended = command.lock().clone();
        self.retain_output(sandbox, &ended);
        sandbox.touch();
        if !acknowledge {
            return;
        }
        let link = self.keepers.get(sandbox.lock().record.keeper).and_then(|k| k.link());
        let (this, sandbox, id) = (self.clone(), sandbox.clone(), command.id.clone());
        tokio::spawn(async move {
            // The keeper is the only witness until the ledger has it.
            if this.ledger.settle().await.is_err() {
                return;
            }
            // Survivors keep the directory; it goes with the sandbox.
            corral_runtime::cgroup::remove_command(this.containers.cgroups(), sandbox.id.as_str(), id.as_str());
            if let Some(link) = link {
                // A keeper that is gone has nothing to forget.
                let _forgotten = link.ask(Request::Acknowledge { command: id }).await;
            }
        });
    }

    /// Ends a command that could not be started: kept, so that its id is answered, and its step key free again.
    pub(super) fn not_started(self: &Arc<Self>, sandbox: &Arc<Sandbox>, command: &Arc<Command>, problem: &Problem) {
        if !command.is_running() {
            return;
        }
        let key = {
            let mut record = command.lock();
            // A command of a session keeps its session; a shell that never ran is none's.
            if std::mem::take(&mut record.is_shell) {
                record.session = None;
            }
            record.step_key.take()
        };
        if let Some(key) = key {
            sandbox.lock().steps.remove(&key);
        }
        command.progress.send_modify(|p| p.failed = Some(problem.clone()));
        let outcome = Outcome::NotStarted { message: problem.message.clone() };
        self.settle(sandbox, command, outcome, [0; 2], None, false);
    }

    fn outcome_of(&self, sandbox: &Sandbox, command: &Command, exit: Exit) -> Outcome {
        if command.timed_out.load(Ordering::Acquire) {
            return Outcome::TimedOut { timeout_ms: command.lock().timeout_ms };
        }
        match (exit.code, exit.signal) {
            (Some(code), _) => Outcome::Exited { code },
            (None, Some(libc::SIGKILL)) if sandbox.lock().rolling_back => Outcome::RolledBack,
            (None, Some(libc::SIGKILL)) if is_ending(sandbox) => Outcome::SandboxEnded,
            (None, Some(signal)) => {
                let mut oom = false;
                if signal == libc::SIGKILL {
                    let kills = self.containers.cgroups().oom_kills(sandbox.id.as_str());
                    let mut inner = sandbox.lock();
                    oom = kills > inner.oom_seen.max(command.oom_before.load(Ordering::Relaxed));
                    // One for each that died of it: others may have died at the same moment.
                    inner.oom_seen += u64::from(oom);
                }
                Outcome::Signaled { signal, name: name_of(signal), oom }
            }
            (None, None) => Outcome::OutcomeUnknown,
        }
    }

    /// Ends what still runs of a sandbox's commands, after the sandbox itself.
    pub fn finish_commands(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        let commands: Vec<Arc<Command>> = sandbox.lock().commands.values().cloned().collect();
        for command in commands.iter().filter(|c| c.is_running()) {
            let outcome = if command.timed_out.load(Ordering::Acquire) {
                Outcome::TimedOut { timeout_ms: command.lock().timeout_ms }
            } else if sandbox.lock().rolling_back {
                Outcome::RolledBack
            } else {
                Outcome::SandboxEnded
            };
            let totals = command.progress.borrow().totals;
            self.settle(sandbox, command, outcome, [totals[0], totals[1]], None, false);
        }
    }
}

/// Whether a sandbox is being ended, or its first process is on its way out and takes all others with it: these are
/// reported first.
pub(crate) fn is_ending(sandbox: &Sandbox) -> bool {
    let (ending, init) = {
        let inner = sandbox.lock();
        (inner.ending.is_some(), inner.init)
    };
    ending || sandbox.pulse.borrow().dead || is_exiting(init)
}

/// Whether a process is exiting, or gone.
fn is_exiting(pid: i32) -> bool {
    /// Of the kernel's include/linux/sched.h.
    const PF_EXITING: u32 = 4;
    /// Place of the flags behind the name: proc_pid_stat(5).
    const FLAGS: usize = 6;
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = text.rsplit_once(')').map(|(_, rest)| rest.split_whitespace());
    let flags = fields.and_then(|mut f| f.nth(FLAGS)?.parse::<u32>().ok());
    flags.is_none_or(|flags| flags & PF_EXITING != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_runs_is_not_exiting() {
        assert!(!is_exiting(std::process::id() as i32));
        assert!(is_exiting(0), "there is none");
    }
}
