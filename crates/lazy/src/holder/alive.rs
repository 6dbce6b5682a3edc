//! A holder and its server seen from outside: whether a root has them, and which processes they are.
//!
//! Both have the lock of the root open, and nobody else has. That holds when neither answers, too.

use super::LOCK;
use crate::descriptors::open_as;
use corral_sys::process;
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::path::Path;

/// Whether a process serves a root, be it that it answers or not.
pub fn is_held(root: &Path) -> bool {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let Ok(lock) = rustix::fs::open(root.join(LOCK), flags, Mode::empty()) else { return false };
    // Given back at once.
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockShared).is_err()
}

/// Whether a root is mounted with nobody to answer: what was read through it can never be read again.
pub fn is_lost(root: &Path) -> bool {
    super::mount::is_mounted(root) && !is_held(root)
}

/// The processes that serve a root. Looks at every process of the host.
pub fn processes(root: &Path) -> Vec<i32> {
    let Ok(lock) = std::fs::canonicalize(root.join(LOCK)) else { return Vec::new() };
    let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    // Cheaper to ask than what it has open.
    let is_named = |pid: &i32| std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name == b"corral-lazy\n");
    pids.filter(is_named).filter(|pid| open_as(*pid, |to| to == lock).is_some()).collect()
}

/// Ends all that serve a root, stopped ones too, and without a word: readers wait for whoever goes on.
pub fn kill(root: &Path) {
    for pid in processes(root) {
        // One that ended just now needs no signal.
        process::kill(pid, libc::SIGKILL).unwrap_or(());
    }
}
