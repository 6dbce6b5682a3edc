//! The kernel's automounter (autofs): it tells a daemon what is wanted over a pipe, and is answered by these requests.

use crate::check;
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};

const AUTOFS_IOC_READY: u64 = 0x9360;
const AUTOFS_IOC_FAIL: u64 = 0x9361;

/// Lets those who wait for a mount go on: into it, or with ENOENT when there is none.
///
/// # Errors
/// Those of AUTOFS_IOC_READY and AUTOFS_IOC_FAIL; EINVAL when nobody waits under this token.
pub fn answer(root: BorrowedFd<'_>, token: u32, mounted: bool) -> Result<(), Errno> {
    let request = if mounted { AUTOFS_IOC_READY } else { AUTOFS_IOC_FAIL };
    // SAFETY: both requests take a token by value.
    check(unsafe { libc::ioctl(root.as_raw_fd(), request as _, libc::c_ulong::from(token)) }.into())?;
    Ok(())
}
