//! Turning what was packed in the staging directory into a layer.

use super::{LayerFiles, LayerStore, StoredLayer, remove_tree};
use crate::error::StoreError;
use crate::pack::Packed;
use crate::record;
use corral_api::digest::Digest;
use corral_api::image::{LayerKind, LayerRecord};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

impl LayerStore {
    /// Publishes what was packed; an equal layer that is there already is used instead.
    ///
    /// # Errors
    /// The host refuses; nothing is visible then.
    pub(crate) fn publish(&self, packed: &Packed, kind: LayerKind, at: &str) -> Result<LayerRecord, StoreError> {
        let io = |e: io::Error| StoreError::io("publish", &packed.data, e);
        let manifest = packed.manifest.encode();
        let digest = Digest::of(&manifest);
        let size_bytes = packed.manifest.size();
        let layer = LayerRecord { digest, kind, at: at.to_owned(), size_bytes, entries: packed.tally.entries };
        // Outside of the store's turn: others publish while the disk is slow.
        let made = packed.data.with_extension("layer");
        std::fs::create_dir(&made).map_err(io)?;
        let files = LayerFiles::in_dir(&made);
        write_synced(&made.join("manifest"), &manifest)?;
        write_synced(&files.meta, &packed.meta)?;
        std::fs::rename(&packed.data, &files.data).map_err(io)?;
        File::open(&made).and_then(|dir| dir.sync_all()).map_err(io)?;
        let _turn = self.turn();
        self.0.made.note([digest]);
        if self.holds_sound(&digest) {
            remove_tree(&made)?;
            return Ok(layer);
        }
        let path = self.dir_of(&digest);
        remove_tree(&path)?;
        std::fs::rename(&made, &path).map_err(|e| StoreError::io("publish", &path, e))?;
        record::sync_parent(&path)?;
        let marks = LayerFiles::in_dir(&path).marks().map_err(io)?;
        let stored = StoredLayer { layer: layer.clone(), marks: Some(marks) };
        record::write(&self.record_path(&digest), &self.staging_dir(), &stored)?;
        Ok(layer)
    }

    /// Whether a layer is there and, as far as it is here, sound. One that is not is made again.
    pub(crate) fn holds(&self, digest: &Digest) -> bool {
        !self.is_complete(digest).unwrap_or(false) || self.check(digest).is_ok()
    }

    /// Whether the whole layer is there and untouched, or touched but still itself.
    fn holds_sound(&self, digest: &Digest) -> bool {
        self.stored(digest).is_ok() && self.is_complete(digest).unwrap_or(false) && self.check(digest).is_ok()
    }
}

pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let io = |e: io::Error| StoreError::io("write", path, e);
    let mut file = File::create_new(path).map_err(io)?;
    file.write_all(bytes).map_err(io)?;
    file.sync_data().map_err(io)
}
