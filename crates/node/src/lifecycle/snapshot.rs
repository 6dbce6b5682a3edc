//! Snapshots: what a sandbox wrote becomes a layer, and with the layers it stands on an image.

use crate::error::import_problem;
use crate::ledger::Change;
use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::image::{ImageRecord, PackReport, SnapshotOrigin, SnapshotSpec};
use corral_api::problem::{ErrorKind, Problem};
use corral_layers::{CancelFlag, Scrub};
use std::sync::Arc;
use std::time::Instant;

impl Core {
    /// Packs a sandbox's writable layer. It stands still only while its file system is copied; it may be paused.
    ///
    /// # Errors
    /// Bad rules, a sandbox that has ended, or the host refuses; nothing of it stays then.
    pub async fn snapshot(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        snapshot: SnapshotSpec,
    ) -> Result<ImageRecord, Problem> {
        let scrub = Scrub::new(&snapshot.scrub);
        let scrub = scrub.map_err(|e| Problem::new(ErrorKind::InvalidRequest, e.to_string()).sandbox(&sandbox.id))?;
        let still = self.still(sandbox).await?;
        let frozen_us = still.frozen.as_micros() as u64;
        let begun = Instant::now();
        let (this, upper, below) = (self.clone(), still.upper(), sandbox.lock().record.environment.clone());
        let packed = tokio::task::spawn_blocking(move || {
            let packed = this.layers.pack_tree(&upper, &scrub, &CancelFlag::new())?;
            // Of the environment's layers, which a sandbox keeps in place.
            let image = this.layers.image_of(&below.layers, &packed.layer, below.config)?;
            Ok::<_, corral_layers::ImportError>((packed, image))
        });
        let packed = packed.await.map_err(|_| Problem::new(ErrorKind::Internal, "packing the snapshot failed"))?;
        let (packed, mut image) = packed.map_err(|e| import_problem(&e).sandbox(&sandbox.id))?;
        let pack_ms = begun.elapsed().as_millis() as u64;
        let begun = Instant::now();
        self.publish_layers(&image.layers.iter().map(|l| l.digest).collect::<Vec<_>>()).await?;
        let (parent, record) = {
            let mut inner = sandbox.lock();
            let record = &mut inner.record;
            let before = record.last_snapshot.replace(snapshot.name.clone());
            (before.unwrap_or_else(|| record.environment.name.clone()), record.clone())
        };
        self.ledger.post(vec![Change::Sandbox(Box::new(record))]);
        image.name = snapshot.name;
        image.snapshot = Some(Box::new(SnapshotOrigin {
            sandbox_id: sandbox.id.clone(),
            parent: Some(parent),
            created_at: crate::clock::rfc3339(crate::clock::now_ms()),
            report: PackReport {
                entries: packed.layer.entries,
                deletions: packed.deletions,
                size_bytes: packed.layer.size_bytes,
                frozen_us,
                pack_ms,
                upload_ms: begun.elapsed().as_millis() as u64,
                scrubbed: packed.scrubbed,
                scrubbed_count: packed.scrubbed_count,
            },
        }));
        Ok(image)
    }
}
