//! The local layer store: one directory, one owner process.
//!
//! ```text
//! <root>/lock              held while the store is open
//!        layers/<hex>.erofs  the layer            layers/<hex>.json  its record
//!        chains/<key>.json   run of diff ids → layer
//!        staging/            work in progress, emptied on open
//!        mounts/<hex>        where a layer is mounted
//! ```
//!
//! A layer exists once its record does: the file is synced and renamed first, the record after it. A file without a
//! record is the leftover of a crash and removed on open.

mod publish;

use crate::config::LayersConfig;
use crate::error::StoreError;
use crate::mkfs::Mkfs;
use crate::mount::Mounts;
use crate::{ImportError, chain, record, stream, superblock};
use corral_api::digest::Digest;
use corral_api::image::LayerRecord;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// What the store keeps of a layer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StoredLayer {
    pub(crate) layer: LayerRecord,
    /// The file as it was when its digest was last computed.
    pub(crate) mark: FileMark,
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
    mkfs: OnceLock<Mkfs>,
    /// Held while a layer appears or disappears.
    publishing: Mutex<()>,
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
        let inner = Inner { root, config, _lock: lock, mkfs: OnceLock::new(), publishing: Mutex::new(()), mounts };
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

    /// Where a layer's file lies; whether it is there is not looked at.
    pub fn path_of(&self, digest: &Digest) -> PathBuf {
        self.layers_dir().join(format!("{}.erofs", digest.hex()))
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
        // The record first: without it the layer is gone, whatever happens to the file.
        for path in [self.record_path(digest), self.path_of(digest)] {
            remove_if_there(&path)?;
        }
        record::sync_parent(&self.path_of(digest))?;
        self.clean_chains()
    }

    /// Reads the whole file and compares its digest. Blocks for about a second per GiB.
    ///
    /// # Errors
    /// [`StoreError::DigestMismatch`] for a corrupt file, [`StoreError::NotFound`] for none.
    pub fn verify(&self, digest: &Digest) -> Result<(), StoreError> {
        let mut stored = self.stored(digest)?;
        let path = self.path_of(digest);
        let io = |e: io::Error| StoreError::io("read", &path, e);
        let before = FileMark::of(&path.metadata().map_err(io)?);
        let actual = stream::digest_of_file(&path).map_err(io)?;
        if actual != *digest {
            return Err(StoreError::DigestMismatch { expected: *digest, actual });
        }
        if stored.mark != before {
            stored.mark = before;
            let _turn = self.turn();
            // Not again if it was deleted meanwhile.
            if self.record_path(digest).exists() {
                record::write(&self.record_path(digest), &self.staging_dir(), &stored)?;
            }
        }
        Ok(())
    }

    /// The cheap check before a mount: size and superblock, and the whole file if it was touched since it was hashed.
    pub(crate) fn check(&self, digest: &Digest) -> Result<PathBuf, StoreError> {
        let stored = self.stored(digest)?;
        let path = self.path_of(digest);
        let io = |e: io::Error| StoreError::io("read", &path, e);
        let damaged = |reason: String| StoreError::Damaged { digest: *digest, reason };
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(damaged("its file is missing".to_owned())),
            Err(e) => return Err(io(e)),
        };
        let meta = file.metadata().map_err(io)?;
        if meta.len() != stored.layer.size_bytes {
            return Err(damaged(format!("{} bytes instead of {}", meta.len(), stored.layer.size_bytes)));
        }
        superblock::check(&file).map_err(io)?.map_err(|reason| damaged(reason.to_owned()))?;
        if FileMark::of(&meta) != stored.mark {
            self.verify(digest)?;
        }
        Ok(path)
    }

    pub(crate) fn config(&self) -> &LayersConfig {
        &self.0.config
    }

    pub(crate) fn mounts(&self) -> &Mounts {
        &self.0.mounts
    }

    pub(crate) fn mkfs(&self) -> Result<&Mkfs, ImportError> {
        if let Some(mkfs) = self.0.mkfs.get() {
            return Ok(mkfs);
        }
        let probed = Mkfs::probe(&self.0.config.mkfs)?;
        Ok(self.0.mkfs.get_or_init(|| probed))
    }

    pub(crate) fn layers_dir(&self) -> PathBuf {
        self.0.root.join("layers")
    }

    pub(crate) fn chains_dir(&self) -> PathBuf {
        self.0.root.join("chains")
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
            if let Some(digest) = digest_of_name(&path, "erofs")
                && !self.record_path(&digest).exists()
            {
                remove_if_there(&path)?;
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

fn files(dir: &Path) -> Result<Vec<PathBuf>, StoreError> {
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

fn remove_if_there(path: &Path) -> Result<(), StoreError> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(StoreError::io("remove", path, e)),
        _ => Ok(()),
    }
}
