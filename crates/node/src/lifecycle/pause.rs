//! Pause and resume, by the freezer; and the way in for requests that need a running sandbox.

use crate::error::runtime_problem;
use crate::node::Core;
use crate::sandbox::{Activity, Sandbox};
use corral_api::problem::{ErrorKind, Problem};
use corral_api::sandbox::{SandboxStatus, State};
use std::sync::Arc;

impl Core {
    /// Freezes a running sandbox. One that is paused already stays so.
    ///
    /// # Errors
    /// When it does not run, or cannot be frozen.
    pub async fn pause(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<SandboxStatus, Problem> {
        let _one = sandbox.lifecycle.lock().await;
        match sandbox.state() {
            State::Running => {}
            State::Paused => return Ok(sandbox.status()),
            other => return Err(wrong_state(sandbox, other)),
        }
        // No process may be on its way in: it would freeze half-way.
        let _alone = sandbox.gate.write().await;
        self.containers.set_frozen(&sandbox.id, true).await.map_err(|e| runtime_problem(&e).sandbox(&sandbox.id))?;
        self.set_state(sandbox, State::Paused);
        // What is not known to be paused goes on when the node starts anew.
        self.ledger.settle().await.map_err(|e| crate::error::ledger_problem(&e).sandbox(&sandbox.id))?;
        Ok(sandbox.status())
    }

    /// Thaws a paused sandbox. One that runs already goes on.
    ///
    /// # Errors
    /// When it is neither, or cannot be thawed.
    pub async fn resume(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<SandboxStatus, Problem> {
        let _one = sandbox.lifecycle.lock().await;
        match sandbox.state() {
            State::Paused => {}
            State::Running => return Ok(sandbox.status()),
            other => return Err(wrong_state(sandbox, other)),
        }
        self.containers.set_frozen(&sandbox.id, false).await.map_err(|e| runtime_problem(&e).sandbox(&sandbox.id))?;
        self.set_state(sandbox, State::Running);
        sandbox.touch();
        Ok(sandbox.status())
    }

    /// Lets a request for commands or files in: waits for a start, resumes a paused sandbox if it may.
    ///
    /// # Errors
    /// When the sandbox is paused and does not resume by itself, or is ending.
    pub async fn enter(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<Activity, Problem> {
        let activity = sandbox.begin();
        match sandbox.state() {
            State::Running => Ok(activity),
            State::Paused if sandbox.lock().record.spec.auto_resume => {
                self.resume(sandbox).await?;
                Ok(activity)
            }
            State::Paused => {
                let text = "the sandbox is paused and auto_resume is off: resume it first";
                Err(Problem::new(ErrorKind::Conflict, text).sandbox(&sandbox.id))
            }
            State::Pending | State::Starting => {
                let mut pulse = sandbox.pulse.subscribe();
                // The sender lives as long as the sandbox.
                let _seen = pulse.wait_for(|p| !matches!(p.state, State::Pending | State::Starting)).await;
                match sandbox.state() {
                    State::Running => Ok(activity),
                    other => Err(wrong_state(sandbox, other)),
                }
            }
            other => Err(wrong_state(sandbox, other)),
        }
    }
}

fn wrong_state(sandbox: &Sandbox, state: State) -> Problem {
    match state {
        State::Stopping | State::Ended => crate::node::ended_problem(&sandbox.record_with_end()),
        other => Problem::new(ErrorKind::Conflict, format!("the sandbox is {other:?}")).sandbox(&sandbox.id),
    }
}
