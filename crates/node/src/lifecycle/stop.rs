//! The end of a sandbox, whatever brought it about: everything in it is killed, everything of it removed.

use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::sandbox::{EndReason, EndStatus, SandboxStatus, State};
use corral_keeper::protocol::Exit;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Core {
    /// Ends a sandbox for a reason; the first reason counts. Returns when nothing of it is left but its record and logs.
    pub async fn end(self: &Arc<Self>, sandbox: &Arc<Sandbox>, end: EndStatus) -> SandboxStatus {
        // Not cancel-safe: in a task of its own.
        let (this, of) = (self.clone(), sandbox.clone());
        let done = tokio::spawn(async move { this.end_once(&of, end).await }).await;
        if done.is_err() {
            tracing::error!(sandbox_id = %sandbox.id, "ending a sandbox failed unexpectedly");
        }
        sandbox.status()
    }

    async fn end_once(self: &Arc<Self>, sandbox: &Arc<Sandbox>, end: EndStatus) {
        let _one = sandbox.lifecycle.lock().await;
        if matches!(sandbox.state(), State::Ended) {
            return;
        }
        let record = {
            let mut inner = sandbox.lock();
            inner.ending.get_or_insert(end);
            inner.record.clone()
        };
        if record.state != State::Stopping {
            self.set_state(sandbox, State::Stopping);
        }
        self.tear_down(sandbox, record.keeper).await;
        self.finish_commands(sandbox);
        if let Some(keeper) = self.keepers.get(record.keeper) {
            keeper.live.fetch_sub(1, Ordering::Relaxed);
        }
        self.remove_checkpoints(sandbox).await;
        self.give_slot(record.slot);
        let reason = sandbox.lock().ending.as_ref().map(|e| e.reason);
        let reason = serde_json::to_string(&reason).unwrap_or_default().trim_matches('"').to_owned();
        self.metrics.ends.get_or_create(&crate::metrics::ReasonLabel { reason }).inc();
        self.set_state(sandbox, State::Ended);
        self.remove(&sandbox.id);
    }

    /// Kills and removes. What fails is logged and tried again by upkeep: nothing here stops the rest.
    async fn tear_down(self: &Arc<Self>, sandbox: &Arc<Sandbox>, keeper: usize) {
        /// A first process that does not die within this is stuck in the kernel.
        const DIES_WITHIN: Duration = Duration::from_secs(10);
        let id = &sandbox.id;
        if let Err(error) = self.containers.kill(id) {
            tracing::error!(sandbox_id = %id, error = %crate::error::chain(&error), "cannot kill a sandbox");
        }
        if let Some(keeper) = self.keepers.get(keeper)
            && sandbox.lock().init != 0
        {
            let dead = tokio::time::timeout(DIES_WITHIN, sandbox.wait_dead());
            tokio::select! {
                dead = dead => if dead.is_err() && !keeper.is_stuck() {
                    tracing::error!(sandbox_id = %id, "a sandbox's first process does not die");
                },
                // It will not tell; the process dies all the same.
                () = keeper.until_stuck() => {}
            }
            keeper.forget(id).await;
        }
        // Only for what is done here: what waits for a keeper holds nobody up.
        let _turn = self.removals.acquire().await;
        if let Err(error) = self.containers.remove(id).await {
            tracing::error!(sandbox_id = %id, error = %crate::error::chain(&error), "cannot remove all of a sandbox; it is tried again");
        }
    }

    /// The first process of a sandbox has ended by itself, or was killed.
    pub fn first_process_ended(self: &Arc<Self>, sandbox: &Arc<Sandbox>, exit: Exit) {
        sandbox.note_dead();
        if matches!(sandbox.state(), State::Stopping | State::Ended) || sandbox.lock().rolling_back {
            return;
        }
        let oom = exit.signal == Some(libc::SIGKILL)
            && self.containers.cgroups().oom_kills(sandbox.id.as_str()) > sandbox.lock().oom_seen;
        let end = if oom {
            EndStatus::new(EndReason::Oom, "the sandbox's memory was used up and its first process was killed")
        } else {
            let how = exit
                .signal
                .map_or_else(|| format!("exit code {}", exit.code.unwrap_or(-1)), |signal| format!("signal {signal}"));
            EndStatus::new(EndReason::InitExited, format!("its first process ended: {how}"))
        };
        let (this, sandbox) = (self.clone(), sandbox.clone());
        tokio::spawn(async move { this.end(&sandbox, end).await });
    }
}
