//! The part of the mount API that rustix lacks: attributes and id mappings of detached mounts.

use crate::check;
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Attributes for [`set_attributes`], as in mount_setattr(2).
pub mod attr {
    /// Read-only.
    pub const RDONLY: u64 = 0x1;
    /// Ignore set-user-id bits.
    pub const NOSUID: u64 = 0x2;
    /// No devices.
    pub const NODEV: u64 = 0x4;
    /// No programs.
    pub const NOEXEC: u64 = 0x8;
}

/// `struct mount_attr` of linux/mount.h.
#[repr(C)]
struct MountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;

/// Sets attributes of the mount a descriptor names, and maps its ids through a user namespace where one is given.
///
/// # Errors
/// Those of mount_setattr(2).
pub fn set_attributes(mount: BorrowedFd<'_>, set: u64, idmap: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    set_with(mount, libc::AT_EMPTY_PATH, set, idmap)
}

/// Sets attributes of a tree of mounts.
///
/// # Errors
/// Those of mount_setattr(2).
pub fn set_tree_attributes(mount: BorrowedFd<'_>, set: u64) -> Result<(), Errno> {
    set_with(mount, libc::AT_EMPTY_PATH | libc::AT_RECURSIVE, set, None)
}

fn set_with(mount: BorrowedFd<'_>, flags: i32, set: u64, idmap: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let mut attributes = MountAttr { attr_set: set, attr_clr: 0, propagation: 0, userns_fd: 0 };
    if let Some(fd) = idmap {
        attributes.attr_set |= MOUNT_ATTR_IDMAP;
        attributes.userns_fd = fd.as_raw_fd() as u64;
    }
    // SAFETY: an empty path with AT_EMPTY_PATH names the descriptor; the struct has the size that is passed.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attributes,
            size_of::<MountAttr>(),
        )
    })?;
    Ok(())
}
