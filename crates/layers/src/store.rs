//! The local layer store: one directory, one owner process.
//!
//! ```text
//! <root>/lock              held while the store is open
//!        layers/<hex>/      the layer: manifest, meta, data (docs/layer-format.md)
//!        layers/<hex>.json  its record
//!        chains/<key>.json   run of diff ids → layer
//!        staging/            work in progress, emptied on open
//!        mounts/<hex>        where a layer is mounted
//! ```
//!
//! A layer exists once its record does: its directory is synced and renamed first, the record after it. A directory
//! without a record is the leftover of a crash and removed on open.

mod arrive;
mod publish;
mod sound;

pub(crate) use arrive::Arrival;

use crate::config::LayersConfig;
use crate::error::StoreError;
use crate::mount::Mounts;
use crate::recent::Recent;
use crate::{chain, record};
use corral_api::digest::Digest;
use corral_api::image::LayerRecord;
use corral_format::manifest::Manifest;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// What the store keeps of a layer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StoredLayer {
    pub(crate) layer: LayerRecord,
    /// Metadata and data as they were when they were last hashed; nothing while data is missing.
    pub(crate) marks: Option<[FileMark; 2]>,
}

/// The files of a layer that the kernel mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LayerFiles {
    /// Metadata.
    pub(crate) meta: PathBuf,
    /// Data.
    pub(crate) data: PathBuf,
}

impl LayerFiles {
    pub(crate) fn in_dir(dir: &Path) -> Self {
        Self { meta: dir.join("meta"), data: dir.join("data") }
    }

    /// How both are now.
    pub(crate) fn marks(&self) -> io::Result<[FileMark; 2]> {
        Ok([FileMark::of(&self.meta.metadata()?), FileMark::of(&self.data.metadata()?)])
    }
}

/// Tells whether a file was changed or replaced since: what a write or a copy cannot leave as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileMark {
    size: u64,
    mtime_s: i64,
    mtime_ns: i64,
    inode: u64,
}

impl FileMark {
    pub(crate) fn of(meta: &std::fs::Metadata) -> Self {
        Self { size: meta.len(), mtime_s: meta.mtime(), mtime_ns: meta.mtime_nsec(), inode: meta.ino() }
    }
}

struct Inner {
    root: PathBuf,
    config: LayersConfig,
    _lock: File,
    /// Held while a layer appears or disappears.
    publishing: Mutex<()>,
    /// Layers that were made or used for something new.
    made: Recent<Digest>,
    mounts: Mounts,
}

/// The layers of one node. Clones share the store.
#[derive(Clone)]
pub struct LayerStore(Arc<Inner>);

impl std::fmt::Debug for LayerStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerStore").field("root", &self.0.root).finish_non_exhaustive()
    }
}

/// Locks a file. A child that was forked shares the lock of a store that was just closed until it executes: that takes
/// moments, and is no other store.
fn take_lock(file: &File) -> Result<(), Errno> {
    const WAIT: Duration = Duration::from_millis(500);
    let begun = Instant::now();
    loop {
        match rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if begun.elapsed() < WAIT => std::thread::sleep(Duration::from_millis(5)),
            other => return other,
        }
    }
}

impl LayerStore {
    /// Opens a store, making its directories, and removes what a crash left. Blocks.
    ///
    /// # Errors
    /// [`StoreError::Locked`] while another store is open on the directory; otherwise what the host says.
    pub fn open(root: impl AsRef<Path>, config: LayersConfig) -> Result<Self, StoreError> {
        let root = root.as_ref();
        for dir in ["", "layers", "chains", "staging", "mounts"] {
            let path = root.join(dir);
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&path)
                .map_err(|e| StoreError::io("make", &path, e))?;
        }
        let root = root.canonicalize().map_err(|e| StoreError::io("find", root, e))?;
        let lock_path = root.join("lock");
        let lock = File::options().create(true).truncate(false).write(true).open(&lock_path);
        let lock = lock.map_err(|e| StoreError::io("open", &lock_path, e))?;
        match take_lock(&lock) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(StoreError::Locked(root)),
            Err(e) => return Err(StoreError::io("lock", &lock_path, e)),
        }
        let mounts = Mounts::new(root.join("mounts"));
        let inner = Inner { root, config, _lock: lock, publishing: Mutex::new(()), made: Recent::default(), mounts };
        let store = Self(Arc::new(inner));
        store.clean_staging()?;
        store.clean_layers()?;
        store.clean_chains()?;
        store.adopt_mounts()?;
        Ok(store)
    }

    /// The record of a layer as it was first published.
    ///
    /// # Errors
    /// [`StoreError::NotFound`], or the record cannot be read.
    pub fn get(&self, digest: &Digest) -> Result<LayerRecord, StoreError> {
        self.stored(digest).map(|stored| stored.layer)
    }

    /// All layers, by digest. A record that cannot be read is logged and left out.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Vec<LayerRecord>, StoreError> {
        let mut out = Vec::new();
        for path in files(&self.layers_dir())? {
            let Some(digest) = digest_of_name(&path, "json") else { continue };
            match self.get(&digest) {
                Ok(layer) => out.push(layer),
                Err(StoreError::NotFound(_)) => {}
                Err(e) => tracing::error!(%digest, error = %e, "layer record cannot be read"),
            }
        }
        out.sort_by_key(|layer| layer.digest);
        Ok(out)
    }

    /// Layers that were made or fetched longer ago than that and are not wanted, by digest.
    ///
    /// # Errors
    /// The directory of the layers cannot be read.
    pub fn unwanted(
        &self,
        wanted: &dyn Fn(&Digest) -> bool,
        older_than: Duration,
    ) -> Result<Vec<LayerRecord>, StoreError> {
        let mut found = self.list()?;
        found.retain(|layer| {
            let made = std::fs::metadata(self.record_path(&layer.digest)).and_then(|record| record.modified());
            !wanted(&layer.digest) && made.is_ok_and(|at| at.elapsed().unwrap_or_default() >= older_than)
        });
        Ok(found)
    }

    /// Notes that a layer is made or used for something that no catalogue names yet: from here on it stays in a
    /// collection that honours [`LayerStore::made_since`]. Waits for a deletion under way.
    pub fn note_made(&self, digest: &Digest) {
        let _turn = self.turn();
        self.0.made.note([*digest]);
    }

    /// Whether that was noted at this time or later.
    pub fn made_since(&self, digest: &Digest, time: SystemTime) -> bool {
        self.0.made.since(digest, time)
    }

    /// Forgets what was noted before.
    pub(crate) fn settle_made(&self, time: SystemTime) {
        self.0.made.forget_before(time);
    }

    /// Where a layer's files lie; whether they are there is not looked at.
    pub fn dir_of(&self, digest: &Digest) -> PathBuf {
        self.layers_dir().join(digest.hex())
    }

    /// Deletes a layer and what is remembered of it.
    ///
    /// # Errors
    /// Refused while `in_use` says so or the layer is mounted.
    pub fn delete(&self, digest: &Digest, in_use: &dyn Fn(&Digest) -> bool) -> Result<(), StoreError> {
        let hold = self.0.mounts.hold(digest);
        // Always this order: mounting holds the layer and may then, in `verify`, take the store's turn.
        let (_mounting, _turn) = (hold.lock(), self.turn());
        self.stored(digest)?;
        if in_use(digest) {
            return Err(StoreError::InUse(*digest));
        }
        if self.is_mounted(digest) {
            return Err(StoreError::Mounted(*digest));
        }
        // The record first: without it the layer is gone, whatever happens to the files.
        remove_if_there(&self.record_path(digest))?;
        remove_tree(&self.dir_of(digest))?;
        record::sync_parent(&self.record_path(digest))?;
        self.clean_chains()
    }

    /// Reads the whole layer and compares its digests. Blocks for about a second per GiB.
    ///
    /// # Errors
    /// [`StoreError::DigestMismatch`] or [`StoreError::Damaged`] for a corrupt layer, [`StoreError::NotFound`] for none.
    pub fn verify(&self, digest: &Digest) -> Result<(), StoreError> {
        let mut stored = self.stored(digest)?;
        let files = LayerFiles::in_dir(&self.dir_of(digest));
        let manifest = sound::manifest_of(digest, &self.dir_of(digest))?;
        sound::check_shape(digest, &manifest, &files)?;
        let before = files.marks().map_err(|e| StoreError::io("read", &files.data, e))?;
        let present = self.presence(digest, &manifest)?;
        sound::check_content(digest, &manifest, &files, present.as_deref())?;
        if !self.is_complete(digest)? {
            return Ok(());
        }
        if stored.marks != Some(before) {
            stored.marks = Some(before);
            let _turn = self.turn();
            // Not again if it was deleted meanwhile.
            if self.record_path(digest).exists() {
                record::write(&self.record_path(digest), &self.staging_dir(), &stored)?;
            }
        }
        Ok(())
    }

    /// The cheap check before a mount: manifest, sizes and superblock, and all content if it was touched since it was
    /// hashed.
    pub(crate) fn check(&self, digest: &Digest) -> Result<LayerFiles, StoreError> {
        let stored = self.stored(digest)?;
        let dir = self.dir_of(digest);
        let files = LayerFiles::in_dir(&dir);
        let manifest = sound::manifest_of(digest, &dir)?;
        sound::check_shape(digest, &manifest, &files)?;
        if !self.is_complete(digest)? {
            // Each chunk is checked when it is read.
            return match self.0.config.lazy_reads {
                true => Ok(LayerFiles { data: self.lazy_dir().join(digest.hex()), ..files }),
                false => Err(StoreError::NotServed(*digest)),
            };
        }
        let marks = files.marks().map_err(|e| StoreError::io("read", &files.data, e))?;
        if stored.marks != Some(marks) {
            self.verify(digest)?;
        }
        Ok(files)
    }

    /// What a layer is made of.
    ///
    /// # Errors
    /// [`StoreError::NotFound`], or its manifest is damaged.
    pub fn manifest(&self, digest: &Digest) -> Result<Manifest, StoreError> {
        self.stored(digest)?;
        sound::manifest_of(digest, &self.dir_of(digest))
    }

    pub(crate) fn config(&self) -> &LayersConfig {
        &self.0.config
    }

    pub(crate) fn mounts(&self) -> &Mounts {
        &self.0.mounts
    }

    pub(crate) fn layers_dir(&self) -> PathBuf {
        self.0.root.join("layers")
    }

    pub(crate) fn chains_dir(&self) -> PathBuf {
        self.0.root.join("chains")
    }

    /// Where the store lies.
    pub fn root(&self) -> &Path {
        &self.0.root
    }

    /// Where a server of lazy reads offers data of layers, each by its digest without the algorithm.
    pub fn lazy_dir(&self) -> PathBuf {
        self.0.root.join("lazy")
    }

    pub(crate) fn staging_dir(&self) -> PathBuf {
        self.0.root.join("staging")
    }

    fn record_path(&self, digest: &Digest) -> PathBuf {
        self.layers_dir().join(format!("{}.json", digest.hex()))
    }

    fn stored(&self, digest: &Digest) -> Result<StoredLayer, StoreError> {
        record::read(&self.record_path(digest))?.ok_or(StoreError::NotFound(*digest))
    }

    fn turn(&self) -> std::sync::MutexGuard<'_, ()> {
        self.0.publishing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn clean_staging(&self) -> Result<(), StoreError> {
        for path in files(&self.staging_dir())? {
            let removed = if path.is_dir() && !path.is_symlink() {
                std::fs::remove_dir_all(&path)
            } else {
                std::fs::remove_file(&path)
            };
            removed.map_err(|e| StoreError::io("remove", &path, e))?;
        }
        Ok(())
    }

    fn clean_layers(&self) -> Result<(), StoreError> {
        for path in files(&self.layers_dir())? {
            if path.is_dir() && !path.with_extension("json").exists() {
                remove_tree(&path)?;
            }
        }
        Ok(())
    }

    fn clean_chains(&self) -> Result<(), StoreError> {
        for path in files(&self.chains_dir())? {
            let stale = match record::read::<chain::Chain>(&path) {
                Ok(Some(chain)) => !self.record_path(&chain.digest).exists(),
                Ok(None) => false,
                Err(_) => true,
            };
            if stale {
                remove_if_there(&path)?;
            }
        }
        Ok(())
    }
}

pub(crate) fn files(dir: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let io = |e| StoreError::io("list", dir, e);
    std::fs::read_dir(dir).map_err(io)?.map(|entry| entry.map(|e| e.path()).map_err(io)).collect()
}

pub(crate) fn digest_of_name(path: &Path, extension: &str) -> Option<Digest> {
    if path.extension().is_some_and(|e| e == extension) {
        format!("sha256:{}", path.file_stem()?.to_str()?).parse().ok()
    } else {
        None
    }
}

pub(crate) fn remove_tree(path: &Path) -> Result<(), StoreError> {
    match std::fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(StoreError::io("remove", path, e)),
        _ => Ok(()),
    }
}

fn remove_if_there(path: &Path) -> Result<(), StoreError> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(StoreError::io("remove", path, e)),
        _ => Ok(()),
    }
}
