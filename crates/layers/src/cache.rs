//! Data of layers that can be had again: how much of it is here, when it was last used, and giving it up.
//!
//! A layer that has a table of places is, or was, in the shared store: its data here is cached. When it was last used is
//! the time of an empty file beside it, `used`, so that a restart forgets nothing.

use crate::error::{MountError, StoreError};
use crate::store::{LayerFiles, LayerStore, digest_of_name, files};
use corral_api::digest::Digest;
use std::fs::{File, FileTimes};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

/// Bytes of a block as stat(2) counts them.
const SECTOR: u64 = 512;
const USED: &str = "used";

/// A layer's data that can be had again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cached {
    /// The layer.
    pub digest: Digest,
    /// Bytes that its data takes on the disk.
    pub bytes: u64,
    /// When a sandbox last had it, as far as that was noted; when it came, where none ever had.
    pub used: SystemTime,
}

impl LayerStore {
    /// What of the data here can be had again, in no certain order. Blocks.
    ///
    /// # Errors
    /// The store cannot be read. A layer that goes meanwhile is left out.
    pub fn cached(&self) -> Result<Vec<Cached>, StoreError> {
        let records = files(&self.layers_dir())?;
        let digests = records.iter().filter_map(|path| digest_of_name(path, "json"));
        Ok(digests.filter_map(|digest| cached_in(digest, &self.dir_of(&digest))).collect())
    }

    /// Notes that layers are in use now. Blocks. Those that are not here are left out.
    pub fn note_use<'a>(&self, digests: impl IntoIterator<Item = &'a Digest>) {
        let now = SystemTime::now();
        for digest in digests {
            if let Err(error) = touch(&self.dir_of(digest).join(USED), now)
                && error.kind() != io::ErrorKind::NotFound
            {
                // It counts as older than it is.
                tracing::warn!(%digest, %error, "the use of a layer cannot be noted");
            }
        }
    }

    /// Has `drop_data` drop the data of a layer, unless it is in use; `None` where it is. Nobody mounts it meanwhile, and
    /// it is mounted nowhere on this node but by who has it open still. Blocks.
    ///
    /// # Errors
    /// It cannot be unmounted.
    pub fn give_up<T>(
        &self,
        digest: &Digest,
        in_use: &dyn Fn(&Digest) -> bool,
        drop_data: impl FnOnce() -> T,
    ) -> Result<Option<T>, MountError> {
        let hold = self.mounts().hold(digest);
        let _turn = hold.lock();
        // Asked under the lock, as by `unmount_unused`.
        if in_use(digest) {
            return Ok(None);
        }
        self.unmount_held(digest)?;
        Ok(Some(drop_data()))
    }
}

/// What a layer's data takes here, where it can be had again.
pub(crate) fn cached_in(digest: Digest, dir: &Path) -> Option<Cached> {
    dir.join("places").metadata().ok()?;
    let data = LayerFiles::in_dir(dir).data.metadata().ok()?;
    let used = dir.join(USED).metadata().and_then(|used| used.modified());
    let used = used.or_else(|_| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    Some(Cached { digest, bytes: data.blocks() * SECTOR, used })
}

fn touch(path: &Path, now: SystemTime) -> io::Result<()> {
    let file = File::options().create(true).append(true).open(path)?;
    file.set_times(FileTimes::new().set_modified(now))
}
