//! Forks: new sandboxes whose disks begin as that of one that lives. Processes are not copied.

use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::catalogue::BatchItem;
use corral_api::digest::Digest;
use corral_api::problem::{ErrorKind, Problem};
use corral_api::sandbox::{CreateOnNode, ForkSpec, SandboxSpec};
use futures_util::stream::{self, StreamExt as _};
use std::sync::Arc;

/// Forks made at a time: more would only wait for each other.
const AT_ONCE: usize = 16;

impl Core {
    /// Forks a sandbox; each fork has its own result, in order. Under an idempotency key a repeated request returns the
    /// same forks.
    ///
    /// # Errors
    /// Bad settings, or the sandbox cannot be copied; nothing was made then.
    pub async fn fork(self: &Arc<Self>, sandbox: &Arc<Sandbox>, fork: ForkSpec) -> Result<Vec<BatchItem>, Problem> {
        let bad = |text: String| Problem::new(ErrorKind::InvalidRequest, text).sandbox(&sandbox.id);
        fork.check().map_err(bad)?;
        let record = sandbox.lock().record.clone();
        let spec = SandboxSpec { labels: fork.labels.clone().unwrap_or(record.spec.labels), ..record.spec };
        spec.check().map_err(bad)?;
        let body = serde_json::to_vec(&(&sandbox.id, &fork)).map_err(|e| bad(e.to_string()))?;
        let body_digest = Digest::of(&body);
        let still = Arc::new(self.still(sandbox).await?);
        let made = stream::iter(0..fork.count).map(|number| {
            let request = CreateOnNode {
                project_id: record.project_id.clone(),
                idempotency_key: fork.idempotency_key.as_ref().map(|key| format!("{key}/{number}")),
                body_digest,
                environment: record.environment.clone(),
                spec: spec.clone(),
            };
            let (this, still) = (self.clone(), still.clone());
            async move {
                match this.create_from(request, Some(still.name.clone())).await {
                    Ok(created) => BatchItem::Sandbox(Box::new(created.status)),
                    Err(problem) => BatchItem::Problem(Box::new(problem)),
                }
            }
        });
        Ok(made.buffered(AT_ONCE).collect().await)
    }
}
