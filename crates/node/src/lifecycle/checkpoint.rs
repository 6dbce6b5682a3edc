//! Checkpoints: the disk of a sandbox as it was, kept beside it; and the way back.
//!
//! A rollback ends all processes, puts a copy of the checkpoint in the place of the writable layer, and starts the first
//! process anew. The sandbox keeps its id, its records and its checkpoints.

use crate::error::runtime_problem;
use crate::ledger::Change;
use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::ids::{CommandId, SandboxId};
use corral_api::problem::{ErrorKind, Problem};
use corral_api::sandbox::{Checkpoint, EndReason, EndStatus, SandboxStatus, State};
use corral_keeper::protocol::Request;
use std::sync::Arc;
use std::time::Duration;

/// Most checkpoints of one sandbox.
const MOST: usize = 64;
/// How names of checkpoints begin. No sandbox's id begins so.
const PREFIX: &str = "checkpoint-";

fn name_of(sandbox: &SandboxId, number: u32) -> String {
    format!("{PREFIX}{sandbox}-{number}")
}

impl Core {
    /// Keeps the disk of a sandbox as it is now. It may be paused.
    ///
    /// # Errors
    /// When there are too many, the sandbox has ended, or the host refuses.
    pub async fn checkpoint(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<Checkpoint, Problem> {
        let _one = sandbox.lifecycle.lock().await;
        let number = {
            let inner = sandbox.lock();
            let kept = &inner.record.checkpoints;
            if kept.len() >= MOST {
                let text = format!("{MOST} checkpoints are kept, the most a sandbox may have: remove some first");
                return Err(Problem::new(ErrorKind::LimitExceeded, text).sandbox(&sandbox.id));
            }
            kept.last().map_or(1, |last| last.number + 1)
        };
        let frozen = self.copy_still(sandbox, &name_of(&sandbox.id, number)).await?;
        let created_at = crate::clock::rfc3339(crate::clock::now_ms());
        let checkpoint = Checkpoint { number, created_at, frozen_us: frozen.as_micros() as u64 };
        self.keep_checkpoints(sandbox, |all| all.push(checkpoint.clone())).await?;
        Ok(checkpoint)
    }

    /// Removes a checkpoint.
    ///
    /// # Errors
    /// When there is none, or the host refuses.
    pub async fn drop_checkpoint(self: &Arc<Self>, sandbox: &Arc<Sandbox>, number: u32) -> Result<(), Problem> {
        let _one = sandbox.lifecycle.lock().await;
        find(sandbox, number)?;
        self.keep_checkpoints(sandbox, |all| all.retain(|c| c.number != number)).await?;
        self.remove_layer(name_of(&sandbox.id, number)).await.map_err(|e| runtime_problem(&e).sandbox(&sandbox.id))
    }

    async fn keep_checkpoints(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        change: impl FnOnce(&mut Vec<Checkpoint>),
    ) -> Result<(), Problem> {
        let record = {
            let mut inner = sandbox.lock();
            change(&mut inner.record.checkpoints);
            inner.record.clone()
        };
        let written = self.ledger.write(vec![Change::Sandbox(Box::new(record))]).await;
        written.map_err(|e| crate::error::ledger_problem(&e).sandbox(&sandbox.id))
    }

    async fn remove_layer(self: &Arc<Self>, name: String) -> Result<(), corral_runtime::RuntimeError> {
        let this = self.clone();
        let removed = tokio::task::spawn_blocking(move || this.containers.writable().remove(&name));
        removed.await.unwrap_or(Err(corral_runtime::RuntimeError::Gone))
    }

    /// Removes all checkpoints of a sandbox that has ended.
    pub(super) async fn remove_checkpoints(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        let kept = std::mem::take(&mut sandbox.lock().record.checkpoints);
        for checkpoint in kept {
            if let Err(error) = self.remove_layer(name_of(&sandbox.id, checkpoint.number)).await {
                tracing::error!(sandbox_id = %sandbox.id, error = %crate::error::chain(&error), "a checkpoint cannot be removed");
            }
        }
    }

    /// Removes checkpoints that no live sandbox knows of, after a restart.
    pub(crate) async fn remove_stray_checkpoints(self: &Arc<Self>) -> Result<(), corral_runtime::RuntimeError> {
        let mut known = std::collections::HashSet::new();
        for sandbox in self.all() {
            let inner = sandbox.lock();
            known.extend(inner.record.checkpoints.iter().map(|c| name_of(&sandbox.id, c.number)));
        }
        for name in self.containers.writable().list()? {
            if name.starts_with(PREFIX) && !known.contains(&name) {
                self.remove_layer(name).await?;
            }
        }
        Ok(())
    }

    /// Puts a sandbox's disk back to a checkpoint. All its processes end; its entry point starts again. One that cannot
    /// be started again ends.
    ///
    /// # Errors
    /// When there is no such checkpoint, the sandbox neither runs nor is paused, or it could not be started again.
    pub async fn rollback(self: &Arc<Self>, sandbox: &Arc<Sandbox>, number: u32) -> Result<SandboxStatus, Problem> {
        // Not cancel-safe, and the caller may hang up: it goes on in a task of its own.
        let (this, of) = (self.clone(), sandbox.clone());
        tokio::spawn(async move { this.rollback_once(&of, number).await })
            .await
            .unwrap_or_else(|_| Err(Problem::new(ErrorKind::Internal, "the rollback failed unexpectedly")))
    }

    async fn rollback_once(self: &Arc<Self>, sandbox: &Arc<Sandbox>, number: u32) -> Result<SandboxStatus, Problem> {
        let lifecycle = sandbox.lifecycle.lock().await;
        if !matches!(sandbox.state(), State::Running | State::Paused) {
            return Err(crate::node::ended_problem(&sandbox.record_with_end()));
        }
        find(sandbox, number)?;
        // What wants to start in it meanwhile waits until it runs again.
        let alone = sandbox.gate.write().await;
        sandbox.lock().rolling_back = true;
        let cleared = self.clear(sandbox).await;
        sandbox.lock().rolling_back = false;
        let started = match cleared {
            Ok(()) => self.start(sandbox, Some(name_of(&sandbox.id, number)), Some(alone)).await,
            Err(problem) => {
                drop(alone);
                Err(problem)
            }
        };
        drop(lifecycle);
        match started {
            Ok(()) => Ok(sandbox.status()),
            Err(problem) => {
                self.end(sandbox, EndStatus::new(EndReason::StorageError, problem.message.clone())).await;
                Err(problem.sandbox(&sandbox.id))
            }
        }
    }

    /// Ends everything in a sandbox and removes its writable layer and cgroups, as at its end.
    async fn clear(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<(), Problem> {
        /// A first process that does not die within this is stuck in the kernel.
        const DIES_WITHIN: Duration = Duration::from_secs(10);
        let failed = |e: &corral_runtime::RuntimeError| runtime_problem(e);
        let link = self.link_of(sandbox)?;
        self.containers.kill(&sandbox.id).map_err(|e| failed(&e))?;
        if tokio::time::timeout(DIES_WITHIN, sandbox.wait_dead()).await.is_err() {
            return Err(Problem::new(ErrorKind::Internal, "the sandbox's first process does not die"));
        }
        link.ask(Request::Forget { sandbox: sandbox.id.clone() }).await.map_err(|e| failed(&e))?;
        self.containers.remove(&sandbox.id).await.map_err(|e| failed(&e))?;
        self.finish_commands(sandbox);
        let mut inner = sandbox.lock();
        inner.sessions.clear();
        inner.oom_seen = 0;
        inner.record.entrypoint = inner.record.environment.config.startup().map(|_| CommandId::random());
        drop(inner);
        sandbox.note_reborn();
        Ok(())
    }
}

fn find(sandbox: &Sandbox, number: u32) -> Result<(), Problem> {
    if sandbox.lock().record.checkpoints.iter().any(|c| c.number == number) {
        return Ok(());
    }
    Err(Problem::new(ErrorKind::NotFound, format!("no checkpoint {number} of this sandbox")).sandbox(&sandbox.id))
}
