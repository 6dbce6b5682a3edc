//! Removes what interrupted puts left in a directory store.

use super::files::{Root, modified, open_beneath};
use super::place::TEMP_DIR;
use crate::error::StoreError;
use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::time::Duration;

/// The file whose time tells the server's clock, which ages are measured by: nodes' clocks differ.
const CLOCK: &str = "clock";

/// Removes temporary files that were last written longer ago than that, and tells how many.
pub(super) fn sweep(root: &Root, older_than: Duration) -> Result<u64, StoreError> {
    let io = |errno| StoreError::io("sweep", TEMP_DIR, errno);
    let dir = match open_beneath(root.dir().as_fd(), TEMP_DIR, OFlags::RDONLY | OFlags::DIRECTORY) {
        Err(Errno::NOENT) => return Ok(0),
        dir => dir.map_err(io)?,
    };
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let clock = rustix::fs::openat(&dir, CLOCK, flags, Mode::from_raw_mode(0o644)).map_err(io)?;
    rustix::io::write(&clock, b".").map_err(io)?;
    let now = modified(&rustix::fs::fstat(&clock).map_err(io)?);
    let mut removed = 0;
    let mut failed = None;
    for entry in Dir::read_from(&dir).map_err(io)? {
        let entry = entry.map_err(io)?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") || name.to_bytes() == CLOCK.as_bytes() {
            continue;
        }
        let aged = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| now.duration_since(modified(&stat)).is_ok_and(|age| age >= older_than));
        if !aged {
            continue;
        }
        match rustix::fs::unlinkat(&dir, name, AtFlags::empty()) {
            Ok(()) => removed += 1,
            // Its writer or another node's sweep was first.
            Err(Errno::NOENT) => {}
            Err(errno) => failed = failed.or(Some(errno)),
        }
    }
    failed.map_or(Ok(removed), |errno| Err(io(errno)))
}
