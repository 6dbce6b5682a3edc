//! The entry point of an environment: the first command of a sandbox, started with it. Its end is not the sandbox's.

use super::Command;
use super::exec::{Enlisted, Start, enlist};
use crate::metrics::Metrics;
use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::digest::Digest;
use std::sync::Arc;

/// An entry point that is in its sandbox's table and not started yet.
#[derive(Debug)]
pub struct Entrypoint {
    command: Arc<Command>,
    start: Start,
}

impl Entrypoint {
    /// Takes the entry point into the sandbox's table. Nothing where there is none, or it was started before.
    pub fn enlist(sandbox: &Sandbox) -> Option<Self> {
        let start = {
            let inner = sandbox.lock();
            let id = inner.record.entrypoint.clone().filter(|id| !inner.commands.contains_key(id))?;
            let body = Digest::of(id.as_str().as_bytes());
            Start::new(id, inner.record.environment.config.startup()?, body)
        };
        match enlist(sandbox, start.record(&sandbox.id)) {
            Ok(Enlisted::New(command)) => Some(Self { command, start }),
            Ok(Enlisted::Known(_)) | Err(_) => None,
        }
    }
}

impl Core {
    /// Starts an entry point. Where that fails, its command says why, and the sandbox lives on.
    pub async fn start_entrypoint(self: &Arc<Self>, sandbox: &Arc<Sandbox>, entrypoint: Entrypoint) {
        let Entrypoint { command, start } = entrypoint;
        let started = self.start_enlisted(sandbox, &command, start).await;
        Metrics::count(&self.metrics.commands, &started);
    }
}
