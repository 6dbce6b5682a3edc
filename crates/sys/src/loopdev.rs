//! Loop devices (loop(4)): block devices over a file.

use crate::check;
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};

const LOOP_SET_CAPACITY: u64 = 0x4C07;
const LOOP_CONFIGURE: u64 = 0x4C0A;
const LOOP_CTL_GET_FREE: u64 = 0x4C82;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

#[repr(C)]
struct LoopInfo64 {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

/// Number of a free loop device, made when there is none.
///
/// # Errors
/// Those of LOOP_CTL_GET_FREE.
pub fn free_number(control: BorrowedFd<'_>) -> Result<u32, Errno> {
    // SAFETY: the request takes no argument.
    let number = check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _) }.into())?;
    Ok(number as u32)
}

/// Puts a file behind a loop device, with direct I/O. The device frees itself at its last close or unmount.
///
/// # Errors
/// Those of LOOP_CONFIGURE; EBUSY when another process took the device first.
pub fn configure(device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: a plain C struct for which all zeroes is valid.
    let mut config: LoopConfig = unsafe { std::mem::zeroed() };
    config.fd = file.as_raw_fd() as u32;
    config.block_size = 4096;
    config.info.flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
    // SAFETY: the request takes a pointer to a loop_config, which lives through the call.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, &raw const config) }.into())?;
    Ok(())
}

/// Makes a device follow the grown size of its file.
///
/// # Errors
/// Those of LOOP_SET_CAPACITY.
pub fn refresh_capacity(device: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: the request takes no argument.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_CAPACITY as _) }.into())?;
    Ok(())
}

const _: () = assert!(size_of::<LoopConfig>() == 304);
