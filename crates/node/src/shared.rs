//! The shared store of layers, as this node uses it: what is made here is published there, and what a sandbox needs comes
//! from there.

use crate::error::store_problem;
use crate::node::Core;
use corral_api::catalogue::{GcOnNode, GcResult, LayerUsageList};
use corral_api::digest::Digest;
use corral_api::image::LayerRecord;
use corral_api::problem::{ErrorKind, Problem};
use corral_layers::{GcReport, GcRules, SharedError, SharedLayers, StoreError};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

/// What a caller is told; the log has the whole chain.
fn problem(error: &SharedError) -> Problem {
    tracing::warn!(error = %crate::error::chain(error), "the shared store of layers failed");
    let problem = match error {
        // Paths of the host, and what the store's client says, are for the log.
        SharedError::Local(e) => store_problem(e),
        SharedError::Io { op, .. } => Problem::new(error.kind(), format!("the node cannot {op} a file it needs")),
        SharedError::Astray { .. } => Problem::new(
            error.kind(),
            "the shared store is not the one this node used before: its mount may be missing, or it was replaced",
        ),
        SharedError::Hollow { .. } => {
            let text = "the shared store holds layers and none of their data: a part of it may not be mounted";
            Problem::new(error.kind(), text)
        }
        SharedError::Remote(e) => Problem::new(error.kind(), format!("the shared store failed: {}", why(e.kind()))),
        other => Problem::new(other.kind(), other.to_string()),
    };
    if problem.kind.is_retryable() { problem.retry_after_ms(1000) } else { problem }
}

/// What failed of the store, in words that name neither its place nor what its client said.
fn why(kind: corral_store::ErrorKind) -> &'static str {
    use corral_store::ErrorKind as Remote;
    match kind {
        Remote::NotFound => "it lacks a part of the layer",
        Remote::Timeout => "it did not answer in time",
        Remote::Unavailable => "it cannot be reached or does not work",
        Remote::Denied => "it refuses access, or may not be written",
        Remote::Corrupt => "its answer was not what was asked for",
        Remote::Invalid => "its configuration is wrong",
        Remote::Full => "it is full",
        Remote::Unsupported => "it lacks something that is needed",
    }
}

impl Core {
    /// Publishes layers that were made here. Nothing to do where there is no shared store.
    ///
    /// # Errors
    /// The store fails; what was published before stays.
    pub async fn publish_layers(&self, digests: &[Digest]) -> Result<(), Problem> {
        let Some(shared) = &self.shared else { return Ok(()) };
        for digest in digests {
            let report = shared.publish(digest).await.map_err(|e| problem(&e))?;
            if !report.existed {
                let (data, known, stored) = (report.data_bytes, report.shared_bytes, report.stored_bytes);
                tracing::info!(%digest, data, known, stored, "a layer was published");
            }
        }
        Ok(())
    }

    /// Sees to it that layers can be mounted here, and gets from the shared store what is not here.
    ///
    /// # Errors
    /// The store fails, or a layer is in neither.
    pub async fn ensure_layers(self: &Arc<Self>, digests: &[Digest], class: &str) -> Result<(), Problem> {
        let Some(shared) = &self.shared else { return Ok(()) };
        let (this, wanted) = (self.clone(), digests.to_vec());
        let missing = tokio::task::spawn_blocking(move || {
            this.layers.note_use(&wanted);
            wanted.into_iter().filter(|d| !this.layers.is_complete(d).unwrap_or(false)).collect::<Vec<_>>()
        });
        for digest in missing.await.unwrap_or_default() {
            self.fetch_layer(shared, &digest).await.map_err(|e| problem(&e))?;
            if let Some(lazy) = &self.lazy
                && let Err(error) = lazy.open(&digest, class).await
            {
                // Nothing is fetched ahead then; what is read is fetched all the same.
                tracing::warn!(%digest, %error, "the server of lazy reads was not told of a layer");
            }
        }
        Ok(())
    }

    async fn fetch_layer(&self, shared: &SharedLayers, digest: &Digest) -> Result<(), SharedError> {
        // One at a time for each layer: others wait for it instead of fetching it, too.
        let turn = self.fetching.turn(digest);
        let _one = turn.lock().await;
        match &self.lazy {
            Some(_) => shared.adopt(digest).await.map(|_| ()),
            None => shared.pull(digest).await,
        }
    }

    /// What layers take here and in the shared store.
    ///
    /// # Errors
    /// One of them cannot be read.
    pub async fn layer_usage(self: &Arc<Self>) -> Result<LayerUsageList, Problem> {
        let this = self.clone();
        let listed = tokio::task::spawn_blocking(move || this.layers.usage()).await;
        let listed = listed.map_err(|_| Problem::new(ErrorKind::Internal, "listing the layers failed"))?;
        let layers = listed.map_err(|e| store_problem(&e))?;
        let cached_bytes = layers.iter().map(|layer| layer.cached_bytes).sum();
        let cache_limit_bytes = self.lazy.as_ref().map(|_| self.cache.limit_bytes.load(Ordering::Relaxed));
        let mut usage = LayerUsageList { layers, elsewhere: 0, cached_bytes, cache_limit_bytes };
        let mut reads = self.lazy_reads().await;
        usage.layers.iter_mut().for_each(|layer| layer.reads = reads.remove(&layer.digest));
        if let Some(shared) = &self.shared {
            let published: HashSet<Digest> = shared.published().await.map_err(|e| problem(&e))?.into_iter().collect();
            usage.layers.iter_mut().for_each(|layer| layer.published = Some(published.contains(&layer.digest)));
            let here = usage.layers.iter().filter(|layer| layer.published == Some(true)).count();
            usage.elsewhere = (published.len() - here) as u64;
        }
        Ok(usage)
    }

    /// Removes from the node, and from the shared store where there is one, what neither the catalogue nor a sandbox here
    /// needs.
    ///
    /// # Errors
    /// Another node's catalogue names layers of the shared store, or that or the host fails; what was removed before stays
    /// removed.
    pub async fn gc_layers(self: &Arc<Self>, request: GcOnNode) -> Result<GcResult, Problem> {
        let mut needed = self.used_layers();
        needed.extend(request.needed);
        let (grace, dry_run) = (Duration::from_millis(request.spec.grace_ms), request.spec.dry_run);
        let settled = SystemTime::UNIX_EPOCH + Duration::from_millis(request.settled_ms);
        let rules = GcRules { needed, grace, dry_run, settled };
        let report = match &self.shared {
            Some(shared) => {
                shared.ensure_alone(self.id.as_str()).await.map_err(|e| problem(&e))?;
                shared.gc(&rules).await.map_err(|e| problem(&e))?
            }
            None => GcReport::default(),
        };
        let this = self.clone();
        let local = tokio::task::spawn_blocking(move || this.gc_local(&rules)).await;
        let local = local.map_err(|_| Problem::new(ErrorKind::Internal, "collecting the layers failed"))??;
        Ok(GcResult {
            layers: report.layers,
            packs: report.packs,
            pack_bytes: report.pack_bytes,
            waiting: report.waiting,
            kept_bytes: report.kept_bytes,
            unfinished: report.unfinished,
            local_bytes: local.iter().map(|l| l.size_bytes).sum(),
            local: local.into_iter().map(|l| l.digest).collect(),
            dry_run,
        })
    }

    /// Removes the node's layers that nothing needs, and tells which. One that a sandbox was given meanwhile stays.
    fn gc_local(&self, rules: &GcRules) -> Result<Vec<LayerRecord>, Problem> {
        let is_new = |digest: &Digest| self.layers.made_since(digest, rules.settled);
        let wanted = |digest: &Digest| rules.needed.contains(digest) || is_new(digest);
        let mut found = self.layers.unwanted(&wanted, rules.grace).map_err(|e| store_problem(&e))?;
        if !rules.dry_run {
            found.retain(|layer| self.forget_layer(&layer.digest, &is_new).is_ok());
        }
        Ok(found)
    }

    /// Removes a layer from the node, unless a sandbox uses it or it is kept for another reason. Blocks.
    pub fn forget_layer(&self, digest: &Digest, is_kept: &dyn Fn(&Digest) -> bool) -> Result<(), StoreError> {
        let used = self.used_layers();
        let in_use = |d: &Digest| used.contains(d) || is_kept(d);
        if !in_use(digest)
            && let Err(errors) = self.layers.unmount_unused(&|d| d != digest || in_use(d))
        {
            for error in errors {
                tracing::warn!(error = %crate::error::chain(&error), "a layer cannot be unmounted");
            }
        }
        self.layers.delete(digest, &in_use)
    }
}

/// One turn for each layer that is being fetched.
#[derive(Debug, Default)]
pub struct Turns(std::sync::Mutex<std::collections::HashMap<Digest, std::sync::Weak<tokio::sync::Mutex<()>>>>);

impl Turns {
    /// The turn of a layer.
    fn turn(&self, digest: &Digest) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(turn) = turns.get(digest).and_then(std::sync::Weak::upgrade) {
            return turn;
        }
        turns.retain(|_, turn| turn.strong_count() > 0);
        let turn = Arc::new(tokio::sync::Mutex::new(()));
        turns.insert(*digest, Arc::downgrade(&turn));
        turn
    }
}
