//! Turning a finished EROFS file in the staging directory into a layer.

use super::{FileMark, LayerStore, StoredLayer};
use crate::error::StoreError;
use crate::{record, stream};
use corral_api::digest::Digest;
use corral_api::image::{LayerKind, LayerRecord};
use std::io;
use std::path::Path;

impl LayerStore {
    /// Publishes a synced file of the staging directory; an equal layer that is there already is used instead.
    ///
    /// # Errors
    /// The host refuses; nothing is visible then.
    pub(crate) fn publish(
        &self,
        built: &Path,
        kind: LayerKind,
        at: &str,
        entries: u64,
    ) -> Result<LayerRecord, StoreError> {
        let io = |e: io::Error| StoreError::io("publish", built, e);
        let digest = stream::digest_of_file(built).map_err(io)?;
        let meta = built.metadata().map_err(io)?;
        let layer = LayerRecord { digest, kind, at: at.to_owned(), size_bytes: meta.len(), entries };
        let _turn = self.turn();
        if self.holds_sound(&digest) {
            std::fs::remove_file(built).map_err(io)?;
            return Ok(layer);
        }
        let path = self.path_of(&digest);
        std::fs::rename(built, &path).map_err(|e| StoreError::io("publish", &path, e))?;
        record::sync_parent(&path)?;
        let stored = StoredLayer { layer: layer.clone(), mark: FileMark::of(&meta) };
        record::write(&self.record_path(&digest), &self.staging_dir(), &stored)?;
        Ok(layer)
    }

    /// Whether the layer is there and untouched, or touched but still itself.
    fn holds_sound(&self, digest: &Digest) -> bool {
        let Ok(stored) = self.stored(digest) else { return false };
        let path = self.path_of(digest);
        let Ok(meta) = path.metadata() else { return false };
        FileMark::of(&meta) == stored.mark || stream::digest_of_file(&path).is_ok_and(|actual| actual == *digest)
    }
}
