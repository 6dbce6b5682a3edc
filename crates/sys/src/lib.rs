//! Linux calls that neither std nor rustix offers safely, behind narrow safe functions.
//!
//! The only home of `unsafe` in the workspace. Nothing here keeps state or makes decisions.

pub mod autofs;
pub mod btrfs;
pub mod fork;
pub mod identity;
pub mod loopdev;
pub mod mounts;
pub mod netdev;
pub mod process;
pub mod seccomp;

/// The error of the system call that just failed in this thread.
fn last_errno() -> rustix::io::Errno {
    let raw = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    rustix::io::Errno::from_raw_os_error(raw)
}

/// Result of a call that returns -1 on failure.
fn check(result: libc::c_long) -> Result<libc::c_long, rustix::io::Errno> {
    if result < 0 { Err(last_errno()) } else { Ok(result) }
}
