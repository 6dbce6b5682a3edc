//! Taking over after a restart: what the keepers hold goes on, what nobody knows is removed.
//!
//! | ledger | keeper | then |
//! |---|---|---|
//! | live | runs | adopted, commands and all |
//! | live | first process ended | ended for that reason |
//! | pending or starting | unknown | refused: ended as `start_failed` |
//! | running or paused | unknown | ended as `keeper_lost`, or `host_rebooted` after a reboot |
//! | unknown or ended | runs | killed and removed |
//! | unknown | unknown, but cgroups or a writable layer exist | removed |

use crate::commands::session::Session;
use crate::commands::{Command, Entrypoint};
use crate::ledger::{CommandRecord, SandboxRecord};
use crate::lifecycle::AFFINITY_NONE;
use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::command::Outcome;
use corral_api::ids::SandboxId;
use corral_api::problem::Problem;
use corral_api::sandbox::{EndReason, EndStatus, State};
use corral_keeper::protocol::{CommandNotice, Request, SandboxNotice};
use corral_runtime::RuntimeError;
use corral_runtime::cgroup;
use corral_runtime::keeper_link::Notice;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use tokio::sync::mpsc;

/// Everything the keepers told at the start.
#[derive(Debug, Default)]
struct Held {
    sandboxes: HashMap<SandboxId, (usize, SandboxNotice)>,
    commands: HashMap<SandboxId, Vec<CommandNotice>>,
}

/// What the adoption came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Adopted {
    /// Sandboxes that go on.
    pub adopted: usize,
    /// Sandboxes that were ended.
    pub ended: usize,
    /// Things of no known sandbox that were removed.
    pub removed: usize,
}

impl Adopted {
    /// All of them.
    pub fn total(&self) -> usize {
        self.adopted + self.ended + self.removed
    }
}

impl Core {
    /// Takes over. Runs before anything is served.
    ///
    /// # Errors
    /// When a keeper of another version listens, or the host cannot be searched.
    pub async fn adopt(
        self: &Arc<Self>,
        live: Vec<SandboxRecord>,
        rebooted: bool,
        mut notices: mpsc::UnboundedReceiver<(usize, Notice)>,
    ) -> Result<(Adopted, tokio::task::JoinHandle<()>), RuntimeError> {
        for keeper in self.keepers.all() {
            self.keepers.reconnect(keeper).await?;
        }
        let mut held = Held::default();
        // What a keeper holds is in the queue when its greeting returns.
        while let Ok((keeper, notice)) = notices.try_recv() {
            match notice {
                Notice::Sandbox(n) => {
                    held.sandboxes.insert(n.sandbox.clone(), (keeper, n));
                }
                Notice::Command(n) => held.commands.entry(n.sandbox.clone()).or_default().push(n),
                Notice::Lost => {
                    if let Some(keeper) = self.keepers.get(keeper) {
                        keeper.disconnect();
                    }
                }
            }
        }
        self.reserve_slots(&live.iter().map(|r| r.slot).collect::<BTreeSet<_>>());
        let mut result = Adopted::default();
        let mut endings = Vec::new();
        for record in live {
            let id = record.id.clone();
            let found = held.sandboxes.remove(&id);
            let commands = held.commands.remove(&id).unwrap_or_default();
            let (sandbox, end) = self.adopt_one(record, found, commands, rebooted).await;
            match end {
                Some(end) => {
                    result.ended += 1;
                    endings.push((sandbox, end));
                }
                None => result.adopted += 1,
            }
        }
        // From here on the keepers are listened to: an end waits for what they tell of it.
        let hearing = tokio::spawn(self.clone().hear(notices));
        futures_util::future::join_all(endings.iter().map(|(sandbox, end)| self.end(sandbox, end.clone()))).await;
        for (id, (keeper, notice)) in held.sandboxes {
            self.remove_stranger(&id, Some((keeper, &notice))).await;
            result.removed += 1;
        }
        let known: BTreeSet<SandboxId> = self.all().iter().map(|s| s.id.clone()).collect();
        for id in self.containers.list()?.into_iter().filter(|id| !known.contains(id)) {
            self.remove_stranger(&id, None).await;
            result.removed += 1;
        }
        self.remove_stray_checkpoints().await?;
        Ok((result, hearing))
    }

    async fn adopt_one(
        self: &Arc<Self>,
        record: SandboxRecord,
        found: Option<(usize, SandboxNotice)>,
        noticed: Vec<CommandNotice>,
        rebooted: bool,
    ) -> (Arc<Sandbox>, Option<EndStatus>) {
        let state = record.state;
        let keeper = record.keeper;
        let sandbox = Arc::new(Sandbox::new(record, AFFINITY_NONE));
        if let Some(keeper) = self.keepers.get(keeper) {
            keeper.live.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        self.insert_adopted(sandbox.clone());
        // Before its commands: their ends are judged by it.
        if let Some((_, notice)) = &found {
            sandbox.lock().init = notice.pid;
            if notice.exit.is_some() {
                sandbox.note_dead();
            }
        }
        self.adopt_commands(&sandbox, noticed).await;
        let entrypoint = Entrypoint::enlist(&sandbox);
        let end = match (state, &found) {
            (State::Stopping, _) => {
                Some(EndStatus::new(EndReason::Stopped, "it was being stopped when the node agent was restarted"))
            }
            (_, Some((_, notice))) => {
                // Choosing looks at every sandbox, this one included: before its lock is taken.
                let cpus = sandbox.lock().record.spec.limits.cpus;
                let affinity = self.choose_cores(cpus);
                let mut inner = sandbox.lock();
                inner.affinity = affinity;
                inner.oom_seen = self.containers.cgroups().oom_kills(sandbox.id.as_str());
                drop(inner);
                if let Some(exit) = notice.exit {
                    let oom = exit.signal == Some(libc::SIGKILL) && sandbox.lock().oom_seen > 0;
                    let reason = if oom { EndReason::Oom } else { EndReason::InitExited };
                    Some(EndStatus::new(reason, "its first process ended while the node agent was away"))
                } else {
                    None
                }
            }
            (State::Pending | State::Starting, None) => {
                sandbox.note_dead();
                Some(EndStatus::new(EndReason::StartFailed, "the node agent was restarted before it was started"))
            }
            (_, None) => {
                sandbox.note_dead();
                let (reason, text) = if rebooted {
                    (EndReason::HostRebooted, "the host was started anew")
                } else {
                    (EndReason::KeeperLost, "its keeper died while the node agent was away")
                };
                Some(EndStatus::new(reason, text))
            }
        };
        if end.is_none() {
            // What stood still for a copy when the node died, or was being paused or resumed, goes on.
            let frozen = state == State::Paused && cgroup::is_frozen(self.containers.cgroups(), sandbox.id.as_str());
            if !frozen && let Err(error) = self.containers.set_frozen(&sandbox.id, false).await {
                tracing::error!(sandbox_id = %sandbox.id, error = %crate::error::chain(&error), "a sandbox cannot be thawed");
            }
            let state = if frozen { State::Paused } else { State::Running };
            if sandbox.state() != state {
                // A start or a thaw that was done but not recorded.
                if sandbox.state() == State::Pending {
                    self.set_state(&sandbox, State::Starting);
                }
                self.set_state(&sandbox, state);
            }
            if let Some(entrypoint) = entrypoint {
                // Its intent is not in the ledger, so it never began: it does now.
                let (this, of) = (self.clone(), sandbox.clone());
                tokio::spawn(async move { this.start_entrypoint(&of, entrypoint).await });
            }
        }
        (sandbox, end)
    }

    async fn adopt_commands(self: &Arc<Self>, sandbox: &Arc<Sandbox>, noticed: Vec<CommandNotice>) {
        let id = sandbox.id.clone();
        let records: Vec<CommandRecord> = match self.read_ledger(move |ledger| ledger.commands(&id)).await {
            Ok(records) => records,
            Err(Problem { message, .. }) => {
                tracing::error!(sandbox_id = %sandbox.id, message, "a sandbox's commands cannot be read");
                Vec::new()
            }
        };
        for record in records {
            let command = Arc::new(Command::new(record.clone()));
            let mut inner = sandbox.lock();
            if let Some(key) = &record.step_key {
                inner.steps.insert(key.clone(), (record.body, record.id.clone()));
            }
            inner.commands.insert(record.id.clone(), command);
        }
        let mut held: HashMap<_, _> = noticed.into_iter().map(|n| (n.command.clone(), n)).collect();
        let commands: Vec<Arc<Command>> = sandbox.lock().commands.values().cloned().collect();
        for command in commands {
            let record = command.lock().clone();
            match held.remove(&command.id) {
                Some(notice) => {
                    let was_running = command.is_running();
                    self.command_noticed(sandbox, &command, &notice);
                    if was_running {
                        self.arm_timeout(sandbox, &command, record.timeout_ms);
                    }
                }
                // It ran in a session's shell: that tells.
                None if command.is_running() && record.within.is_some() => {}
                // Intended, perhaps sent, perhaps done: nobody can know, and it is not run again.
                None if command.is_running() => {
                    self.settle(sandbox, &command, Outcome::OutcomeUnknown, record.totals, None, false);
                }
                None => {}
            }
            if record.is_shell
                && let Some(session) = record.session
            {
                let session = Arc::new(Session::new(session.clone(), command.clone()));
                sandbox.lock().sessions.insert(session.id.clone(), session);
            }
        }
        self.retain_adopted(sandbox);
        self.adopt_turns(sandbox);
        // The keeper may forget what is recorded as ended, and what was never recorded.
        let link = self.keepers.get(sandbox.lock().record.keeper).and_then(|k| k.link());
        if let Some(link) = link {
            for (command, notice) in held {
                if notice.exit.is_some() {
                    // A keeper that is gone has nothing to forget.
                    let _forgotten = link.ask(Request::Acknowledge { command }).await;
                }
            }
        }
    }

    /// Takes over the commands that sessions' shells were given.
    fn adopt_turns(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        let (commands, sessions) = {
            let inner = sandbox.lock();
            (inner.commands.values().cloned().collect::<Vec<_>>(), inner.sessions.clone())
        };
        for command in commands.iter().filter(|c| c.is_running()) {
            let record = command.lock().clone();
            let Some(within) = record.within else { continue };
            let session = record.session.and_then(|id| sessions.get(&id)).filter(|s| s.shell.id == within.shell);
            match session {
                Some(session) => self.resume_turn(sandbox, session, command),
                None => self.settle(sandbox, command, Outcome::OutcomeUnknown, record.totals, None, false),
            }
        }
    }

    /// Kills and removes what belongs to no known sandbox.
    async fn remove_stranger(self: &Arc<Self>, id: &SandboxId, held: Option<(usize, &SandboxNotice)>) {
        tracing::warn!(sandbox_id = %id, "removing what is left of a sandbox that is not in the ledger");
        let link = held.and_then(|(keeper, _)| self.keepers.get(keeper)).and_then(|k| k.link());
        if let Err(error) = self.containers.remove(id).await {
            tracing::error!(sandbox_id = %id, error = %crate::error::chain(&error), "it cannot be removed");
        }
        if let Some(link) = link {
            /// The first process was killed: its exit reaches the keeper within moments.
            const TRIES: u32 = 200;
            for _ in 0..TRIES {
                match link.ask(Request::Forget { sandbox: id.clone() }).await {
                    Err(RuntimeError::Refused(_)) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
                    _ => break,
                }
            }
        }
        std::fs::remove_dir_all(self.log_dir(id)).unwrap_or(());
    }
}
