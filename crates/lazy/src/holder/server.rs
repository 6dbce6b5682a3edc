//! The server as the holder's child.

use super::Holder;
use corral_sys::{fork, process};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Instant;

/// A server that runs.
pub(super) struct Child {
    pub pid: i32,
    pub started: Instant,
    /// The holder's end of the connection to it.
    pub link: OwnedFd,
}

impl Child {
    pub fn start(holder: &Holder) -> Result<Self, Errno> {
        let (link, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let [device, listener, state, lock] = holder.held.all();
        let handed = [device, listener, state, lock, &holder.program, &theirs];
        let numbers = handed.map(|fd| fd.as_raw_fd().to_string()).join(",");
        let words = ["corral-lazy", "serve", "--fds", &numbers, "--holder", &std::process::id().to_string()]
            .map(str::to_owned)
            .into_iter()
            .chain(holder.options.words());
        let words = words.map(CString::new).collect::<Result<Vec<_>, _>>().map_err(|_| Errno::INVAL)?;
        let pid = fork::clone_child(holder.single, 0, None, || {
            let ready = process::reset_signals()
                .and_then(|()| handed.iter().try_for_each(|fd| fcntl_setfd(fd, FdFlags::empty())));
            if ready.is_ok() {
                process::exec_fd(holder.program.as_fd(), &words, &holder.environment);
            }
            127
        })?;
        Ok(Self { pid, started: Instant::now(), link })
    }
}
