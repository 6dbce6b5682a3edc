//! A sandbox's writable layer as it is at one moment, for forks and snapshots.

use crate::error::runtime_problem;
use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::problem::{ErrorKind, Problem};
use corral_api::sandbox::State;
use corral_runtime::writable::TEMPORARY;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A copy that is removed when it is dropped.
#[derive(Debug)]
pub(super) struct Still {
    core: Arc<Core>,
    /// Its name among the writable layers.
    pub(super) name: String,
    /// How long the sandbox stood still for it.
    pub(super) frozen: Duration,
}

impl Still {
    /// Its upper directory.
    pub(super) fn upper(&self) -> PathBuf {
        self.core.containers.writable().upper_of(&self.name)
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        let (core, name) = (self.core.clone(), std::mem::take(&mut self.name));
        // Quick, but it waits for the file system's transaction.
        tokio::task::spawn_blocking(move || {
            if let Err(error) = core.containers.writable().remove(&name) {
                tracing::error!(error = %crate::error::chain(&error), "a snapshot cannot be removed");
            }
        });
    }
}

impl Core {
    /// Copies the writable layer of a sandbox that runs or is paused. Its processes stand still meanwhile, so that the
    /// copy is of one moment; one that is paused stays so.
    ///
    /// # Errors
    /// When it neither runs nor is paused, cannot be frozen, or the host refuses.
    pub(super) async fn still(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<Still, Problem> {
        let _one = sandbox.lifecycle.lock().await;
        let name = format!("{TEMPORARY}{}", corral_api::ids::CommandId::random());
        // What was made of a copy that failed is removed with it.
        let mut still = Still { core: self.clone(), name: name.clone(), frozen: Duration::ZERO };
        still.frozen = self.copy_still(sandbox, &name).await?;
        Ok(still)
    }

    /// Copies the writable layer to this name; how long the sandbox stood still. The caller holds its life cycle.
    pub(super) async fn copy_still(self: &Arc<Self>, sandbox: &Arc<Sandbox>, name: &str) -> Result<Duration, Problem> {
        let failed = |e: &corral_runtime::RuntimeError| runtime_problem(e).sandbox(&sandbox.id);
        let runs = match sandbox.state() {
            State::Running => true,
            State::Paused => false,
            State::Stopping | State::Ended => return Err(crate::node::ended_problem(&sandbox.record_with_end())),
            other => {
                let text = format!("the sandbox is {other:?}");
                return Err(Problem::new(ErrorKind::Conflict, text).sandbox(&sandbox.id));
            }
        };
        self.containers.writable().ensure_room().map_err(|e| failed(&e))?;
        let (of, to, this) = (sandbox.id.clone(), name.to_owned(), self.clone());
        let copy = || tokio::task::spawn_blocking(move || this.containers.writable().snapshot(of.as_str(), &to));
        // No process may be on its way in: it would freeze half-way.
        let alone = if runs { Some(sandbox.gate.write().await) } else { None };
        let begun = Instant::now();
        if runs {
            self.containers.set_frozen(&sandbox.id, true).await.map_err(|e| failed(&e))?;
        }
        let copied = copy().await;
        let thawed = if runs { self.containers.set_frozen(&sandbox.id, false).await } else { Ok(()) };
        let frozen = begun.elapsed();
        drop(alone);
        copied
            .map_err(|_| Problem::new(ErrorKind::Internal, "copying the writable layer failed"))?
            .map_err(|e| failed(&e))?;
        thawed.map_err(|e| failed(&e))?;
        Ok(frozen)
    }
}
