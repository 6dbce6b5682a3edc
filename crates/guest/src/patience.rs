//! Opening what somebody holds for a moment.

use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Opens again while the kernel says so, but not for ever: a rename that raced with the walk (openat2(2)) is over at
/// once, a lease on the file (fcntl(2), F_SETLEASE) only when its holder gives it up.
///
/// # Errors
/// Those of the call; `EAGAIN` after three seconds.
pub fn patiently(open: impl Fn() -> Result<OwnedFd, Errno>) -> Result<OwnedFd, Errno> {
    const AT_ONCE: u32 = 64;
    const STEP: Duration = Duration::from_millis(10);
    const PATIENCE: Duration = Duration::from_secs(3);
    for _ in 0..AT_ONCE {
        match open() {
            Err(Errno::AGAIN) => {}
            other => return other,
        }
    }
    let begun = Instant::now();
    loop {
        std::thread::sleep(STEP);
        match open() {
            Err(Errno::AGAIN) if begun.elapsed() < PATIENCE => {}
            other => return other,
        }
    }
}
