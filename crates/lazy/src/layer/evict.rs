//! Dropping a layer's data, which can be had again.
//!
//! ```text
//! data.new, empty ─▶ map of nothing in the place of the old one ─ synced ─▶ data.new in the place of data ─ synced
//! ```
//! The old file is not touched: what is mounted from it reads on, and its space is free when the last user has gone. A
//! process that dies on the way leaves the old map with the old data, or the map of nothing.

use super::Layer;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

const NEW: &str = "data.new";

impl Layer {
    /// Drops all data; says how many bytes of the disk it took. Reads and writes of it wait meanwhile.
    ///
    /// # Errors
    /// It is being forced to the disk just now, which may take long; or the host refuses, and nothing is dropped, or the
    /// old data stays without a map.
    pub fn evict(&self, boot_id: &str) -> io::Result<u64> {
        const SECTOR: u64 = 512;
        if self.finishing.load(Ordering::Acquire) {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let mut data = self.data.write().unwrap_or_else(PoisonError::into_inner);
        let freed = data.metadata()?.blocks() * SECTOR;
        let new = self.empty_data()?;
        self.map.clear(&self.dir, boot_id)?;
        self.seen_full.store(false, Ordering::Relaxed);
        rustix::fs::renameat(&self.dir, NEW, &self.dir, "data")?;
        *data = new;
        rustix::fs::fsync(&self.dir)?;
        Ok(freed)
    }

    fn empty_data(&self) -> Result<File, Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let new = rustix::fs::openat(&self.dir, NEW, flags, Mode::from_raw_mode(0o600))?;
        rustix::fs::ftruncate(&new, self.manifest.data_len)?;
        rustix::fs::fsync(&new)?;
        Ok(File::from(new))
    }
}
