//! Layers whose data is not here, or not all of it: their tables arrive first, chunks as they are read.

use super::publish::write_synced;
use super::{LayerFiles, LayerStore, StoredLayer};
use crate::error::StoreError;
use crate::record;
use corral_api::digest::Digest;
use corral_api::image::LayerRecord;
use corral_format::manifest::Manifest;
use corral_format::places::Places;
use corral_format::presence;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// A layer without data.
pub(crate) struct Arrival<'a> {
    pub(crate) layer: LayerRecord,
    pub(crate) manifest: &'a Manifest,
    pub(crate) meta: &'a [u8],
    pub(crate) places: &'a Places,
}

impl LayerStore {
    /// Takes a layer in whose data is elsewhere. One that is here stays as it is.
    pub(crate) fn arrive(&self, arrival: &Arrival<'_>) -> Result<(), StoreError> {
        let digest = arrival.layer.digest;
        let staging = self.staging_dir();
        let io = |e: io::Error| StoreError::io("make a layer in", &staging, e);
        let made = tempfile::TempDir::new_in(&staging).map_err(io)?;
        let files = LayerFiles::in_dir(made.path());
        write_synced(&made.path().join("manifest"), &arrival.manifest.encode())?;
        write_synced(&files.meta, arrival.meta)?;
        write_synced(&made.path().join("places"), &arrival.places.encode())?;
        if arrival.manifest.chunks.is_empty() {
            // Nothing is missing.
            write_synced(&files.data, &[])?;
        } else {
            write_synced(&made.path().join("present"), &presence::header(&boot_id()))?;
            let data = File::create_new(&files.data).map_err(io)?;
            data.set_len(arrival.manifest.data_len).and_then(|()| data.sync_data()).map_err(io)?;
        }
        File::open(made.path()).and_then(|dir| dir.sync_all()).map_err(io)?;
        let _turn = self.turn();
        let path = self.dir_of(&digest);
        if self.stored(&digest).is_ok() {
            return Ok(());
        }
        super::remove_tree(&path)?;
        let made = made.keep();
        std::fs::rename(&made, &path).map_err(|e| StoreError::io("publish", &path, e))?;
        record::sync_parent(&path)?;
        let stored = StoredLayer { layer: arrival.layer.clone(), marks: None };
        record::write(&self.record_path(&digest), &self.staging_dir(), &stored)
    }

    fn present_path(&self, digest: &Digest) -> PathBuf {
        self.dir_of(digest).join("present")
    }

    /// Whether all data of a layer is here.
    ///
    /// # Errors
    /// [`StoreError::NotFound`].
    pub fn is_complete(&self, digest: &Digest) -> Result<bool, StoreError> {
        self.stored(digest)?;
        Ok(!self.present_path(digest).exists())
    }

    /// Which chunks are here; nothing where all are.
    pub(crate) fn presence(&self, digest: &Digest, manifest: &Manifest) -> Result<Option<Vec<bool>>, StoreError> {
        let path = self.present_path(digest);
        match std::fs::read(&path) {
            // A map that cannot be read says that nothing is here.
            Ok(bytes) => Ok(Some(match presence::decode(&bytes, manifest.chunks.len(), &boot_id()) {
                Ok(map) if map.trusted => map.chunks,
                _ => vec![false; manifest.chunks.len()],
            })),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(StoreError::io("read", &path, e)),
        }
    }

    /// Where a layer's chunks lie in the shared store.
    ///
    /// # Errors
    /// The layer was never there, or the table is damaged.
    pub(crate) fn places(&self, digest: &Digest) -> Result<Places, StoreError> {
        let path = self.dir_of(digest).join("places");
        let bytes = std::fs::read(&path).map_err(|e| StoreError::io("read", &path, e))?;
        let reason = |e: corral_format::FormatError| StoreError::Damaged { digest: *digest, reason: e.to_string() };
        Places::decode(&bytes).map_err(reason)
    }

    /// Replaces the table of where a layer's chunks lie.
    pub(crate) fn replace_places(&self, digest: &Digest, places: &Places) -> Result<(), StoreError> {
        let path = self.dir_of(digest).join("places");
        let io = |e: io::Error| StoreError::io("write", &path, e);
        let mut file = tempfile::NamedTempFile::new_in(self.staging_dir()).map_err(io)?;
        io::Write::write_all(&mut file, &places.encode()).and_then(|()| file.as_file().sync_data()).map_err(io)?;
        file.persist(&path).map_err(|e| io(e.error))?;
        Ok(())
    }

    /// Looks at a layer of which a server of lazy reads says that all data is here, so that it can be mounted from its
    /// own data. Nothing to do where the data was dropped since.
    ///
    /// # Errors
    /// It is not what it should be, or the host refuses.
    pub fn note_arrived(&self, digest: &Digest) -> Result<(), StoreError> {
        let hold = self.mounts().hold(digest);
        let _turn = hold.lock();
        if self.is_complete(digest)? { self.verify(digest) } else { Ok(()) }
    }

    /// Notes that all data of a layer is here and on the disk.
    ///
    /// # Errors
    /// It is not, or the host refuses.
    pub(crate) fn note_complete(&self, digest: &Digest) -> Result<(), StoreError> {
        let data = LayerFiles::in_dir(&self.dir_of(digest)).data;
        File::open(&data).and_then(|f| f.sync_data()).map_err(|e| StoreError::io("sync", &data, e))?;
        let present = self.present_path(digest);
        remove_present(&present)?;
        record::sync_parent(&present)?;
        // Reads everything once: what a crash tore is found now.
        self.verify(digest)
    }
}

fn remove_present(path: &Path) -> Result<(), StoreError> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(StoreError::io("remove", path, e)),
        _ => Ok(()),
    }
}

fn boot_id() -> String {
    // Where it cannot be read no map is believed that was written before.
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}
