//! The loopback device of the current network namespace.

use crate::check;
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};

/// Brings `lo` up.
///
/// # Errors
/// Those of socket(2) and the SIOCSIFFLAGS request of netdevice(7).
pub fn bring_loopback_up() -> Result<(), Errno> {
    let socket: OwnedFd = rustix::net::socket_with(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?;
    // SAFETY: ifreq is a plain C struct for which all zeroes is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the request takes a pointer to an ifreq, which lives through the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request) }.into())?;
    Ok(())
}
