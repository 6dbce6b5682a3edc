//! Room for what running sandboxes need of a full disk: intents in the ledger and logs of commands. A file holds it
//! and is given up when others have filled the disk.
//!
//! ```text
//! held ── less than LOW free ──▶ given up ── enough free again ──▶ held
//! ```

use rustix::fs::{CWD, FallocateFlags, Mode, OFlags, fallocate, openat, statvfs};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// What the file holds.
const BALLAST: u64 = 64 << 20;
/// Free space below which it is given up.
const LOW: u64 = 32 << 20;
/// Free space below which no sandbox is created.
pub const CREATE_FLOOR: u64 = 256 << 20;

/// The file.
#[derive(Debug)]
pub struct Ballast {
    path: PathBuf,
    held: Mutex<bool>,
}

impl Ballast {
    /// The file of a data directory; it is made by the first `keep`.
    pub fn new(data_dir: &Path) -> Self {
        let path = data_dir.join("ballast");
        Self { held: Mutex::new(path.exists()), path }
    }

    /// Gives the file up where the disk is full, and makes it where there is room. Blocks shortly.
    pub fn keep(&self) {
        let free = free_bytes(&self.path);
        let mut held = self.held.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *held && free < LOW {
            tracing::warn!(free_mib = free >> 20, "the disk is full: what was kept for running sandboxes is given up");
            self.remove();
            *held = false;
        } else if !*held && free >= CREATE_FLOOR + BALLAST {
            *held = self.make();
        }
    }

    fn make(&self) -> bool {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
        let made = openat(CWD, &self.path, flags, Mode::from_raw_mode(0o600))
            .and_then(|file| fallocate(file, FallocateFlags::empty(), 0, BALLAST));
        if made.is_err() {
            self.remove();
        }
        made.is_ok()
    }

    fn remove(&self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, "the ballast cannot be removed");
        }
    }
}

/// Free space on the file system of a file in the data directory, as root may use it.
pub fn free_bytes(file: &Path) -> u64 {
    let dir = file.parent().unwrap_or(Path::new("/"));
    statvfs(dir).map_or(u64::MAX, |s| s.f_bfree * s.f_frsize)
}
