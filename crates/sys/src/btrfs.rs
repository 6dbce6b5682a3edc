//! Subvolumes and their quotas (linux/btrfs.h).

use crate::check;
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};

const fn request(direction: u64, number: u64, size: usize) -> u64 {
    (direction << 30) | ((size as u64) << 16) | (0x94 << 8) | number
}
const WRITE: u64 = 1;
const READ: u64 = 2;

#[repr(C)]
struct VolArgsV2 {
    fd: i64,
    transid: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; 4040],
}

#[repr(C)]
#[derive(Default)]
struct QgroupLimitArgs {
    qgroupid: u64,
    flags: u64,
    max_rfer: u64,
    max_excl: u64,
    rsv_rfer: u64,
    rsv_excl: u64,
}

#[repr(C)]
struct QuotaCtlArgs {
    cmd: u64,
    status: u64,
}

#[repr(C)]
struct InoLookupArgs {
    treeid: u64,
    objectid: u64,
    name: [u8; 4080],
}

fn volume_args(name: &str, fd: i64) -> Result<Box<VolArgsV2>, Errno> {
    let mut args = Box::new(VolArgsV2 { fd, transid: 0, flags: 0, unused: [0; 4], name: [0; 4040] });
    if name.is_empty() || name.len() > 255 || name.contains(['/', '\0']) {
        return Err(Errno::INVAL);
    }
    args.name[..name.len()].copy_from_slice(name.as_bytes());
    Ok(args)
}

fn ioctl<T>(fd: BorrowedFd<'_>, request: u64, args: &mut T) -> Result<(), Errno> {
    // SAFETY: private to this module; each caller pairs the request with the struct of linux/btrfs.h it takes, and the
    // struct outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), request as _, std::ptr::from_mut(args)) }.into())?;
    Ok(())
}

/// Makes an empty subvolume in a directory.
///
/// # Errors
/// Those of BTRFS_IOC_SUBVOL_CREATE_V2.
pub fn create_subvolume(parent: BorrowedFd<'_>, name: &str) -> Result<(), Errno> {
    ioctl(parent, request(WRITE, 24, size_of::<VolArgsV2>()), &mut *volume_args(name, 0)?)
}

/// Makes a writable snapshot of `source` in a directory.
///
/// # Errors
/// Those of BTRFS_IOC_SNAP_CREATE_V2.
pub fn create_snapshot(parent: BorrowedFd<'_>, name: &str, source: BorrowedFd<'_>) -> Result<(), Errno> {
    ioctl(parent, request(WRITE, 23, size_of::<VolArgsV2>()), &mut *volume_args(name, source.as_raw_fd().into())?)
}

/// Removes a subvolume; its space is freed in the background.
///
/// # Errors
/// Those of BTRFS_IOC_SNAP_DESTROY_V2.
pub fn remove_subvolume(parent: BorrowedFd<'_>, name: &str) -> Result<(), Errno> {
    ioctl(parent, request(WRITE, 63, size_of::<VolArgsV2>()), &mut *volume_args(name, 0)?)
}

/// Id of the subvolume that a directory belongs to.
///
/// # Errors
/// Those of BTRFS_IOC_INO_LOOKUP.
pub fn subvolume_id(dir: BorrowedFd<'_>) -> Result<u64, Errno> {
    const FIRST_FREE_OBJECTID: u64 = 256;
    let mut args = Box::new(InoLookupArgs { treeid: 0, objectid: FIRST_FREE_OBJECTID, name: [0; 4080] });
    ioctl(dir, request(READ | WRITE, 18, size_of::<InoLookupArgs>()), &mut *args)?;
    Ok(args.treeid)
}

/// How a filesystem counts what subvolumes use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaMode {
    /// Simple quotas (Linux 6.7): an extent belongs to the subvolume that wrote it; constant cost.
    Simple,
    /// Full qgroups: shared extents are found by back references.
    Full,
}

/// Switches quotas on.
///
/// # Errors
/// Those of BTRFS_IOC_QUOTA_CTL; EINVAL when the kernel lacks the mode.
pub fn enable_quota(fs: BorrowedFd<'_>, mode: QuotaMode) -> Result<(), Errno> {
    let cmd = match mode {
        QuotaMode::Full => 1,
        QuotaMode::Simple => 4,
    };
    ioctl(fs, request(READ | WRITE, 40, size_of::<QuotaCtlArgs>()), &mut QuotaCtlArgs { cmd, status: 0 })
}

/// Limits the bytes a subvolume may use; the limit holds at once for writes through any mount.
///
/// # Errors
/// Those of BTRFS_IOC_QGROUP_LIMIT; ENOTCONN when quotas are off.
pub fn limit_subvolume(fs: BorrowedFd<'_>, subvolume: u64, bytes: u64) -> Result<(), Errno> {
    const MAX_RFER: u64 = 1;
    let mut args =
        QgroupLimitArgs { qgroupid: subvolume, flags: MAX_RFER, max_rfer: bytes, ..QgroupLimitArgs::default() };
    ioctl(fs, request(READ, 43, size_of::<QgroupLimitArgs>()), &mut args)
}

#[repr(C)]
struct QgroupCreateArgs {
    create: u64,
    qgroupid: u64,
}

/// Removes the quota group of a subvolume that is gone.
///
/// # Errors
/// Those of BTRFS_IOC_QGROUP_CREATE: EBUSY while the subvolume is still being cleaned, ENOENT when it is gone already.
pub fn remove_quota_group(fs: BorrowedFd<'_>, subvolume: u64) -> Result<(), Errno> {
    ioctl(
        fs,
        request(WRITE, 42, size_of::<QgroupCreateArgs>()),
        &mut QgroupCreateArgs { create: 0, qgroupid: subvolume },
    )
}

#[repr(C)]
struct SearchKey {
    tree_id: u64,
    min_objectid: u64,
    max_objectid: u64,
    min_offset: u64,
    max_offset: u64,
    min_transid: u64,
    max_transid: u64,
    min_type: u32,
    max_type: u32,
    nr_items: u32,
    unused: u32,
    unused_more: [u64; 4],
}

#[repr(C)]
struct SearchArgs {
    key: SearchKey,
    buf: [u8; 4096 - 104],
}

/// Bytes a subvolume is charged with, as of the last transaction.
///
/// # Errors
/// Those of BTRFS_IOC_TREE_SEARCH; ENOENT when the subvolume has no quota group.
pub fn subvolume_usage(fs: BorrowedFd<'_>, subvolume: u64) -> Result<u64, Errno> {
    const QUOTA_TREE: u64 = 8;
    const QGROUP_INFO: u32 = 242;
    let key = SearchKey {
        tree_id: QUOTA_TREE,
        min_objectid: 0,
        max_objectid: 0,
        min_offset: subvolume,
        max_offset: subvolume,
        min_transid: 0,
        max_transid: u64::MAX,
        min_type: QGROUP_INFO,
        max_type: QGROUP_INFO,
        nr_items: 1,
        unused: 0,
        unused_more: [0; 4],
    };
    let mut args = Box::new(SearchArgs { key, buf: [0; 4096 - 104] });
    ioctl(fs, request(READ | WRITE, 17, size_of::<SearchArgs>()), &mut *args)?;
    // A 32-byte header, then generation, referenced bytes, … as little-endian words.
    if args.key.nr_items == 0 {
        return Err(Errno::NOENT);
    }
    let word: [u8; 8] = args.buf[40..48].try_into().map_err(|_| Errno::INVAL)?;
    Ok(u64::from_le_bytes(word))
}

#[repr(C)]
struct ResizeArgs {
    fd: i64,
    name: [u8; 4088],
}

/// Grows a mounted filesystem to the size of its device.
///
/// # Errors
/// Those of BTRFS_IOC_RESIZE.
pub fn grow_to_device(fs: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut args = Box::new(ResizeArgs { fd: 0, name: [0; 4088] });
    args.name[..3].copy_from_slice(b"max");
    ioctl(fs, request(WRITE, 3, size_of::<ResizeArgs>()), &mut *args)
}

const _: () = {
    assert!(size_of::<VolArgsV2>() == 4096);
    assert!(size_of::<InoLookupArgs>() == 4096);
    assert!(size_of::<QgroupLimitArgs>() == 48);
    assert!(size_of::<SearchArgs>() == 4096);
    assert!(size_of::<ResizeArgs>() == 4096);
};
