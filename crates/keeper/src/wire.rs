//! Messages with descriptors over a seqpacket socket.

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Most descriptors in one message (SCM_MAX_FD).
pub const MAX_FDS: usize = 253;

/// A message as it came.
#[derive(Debug)]
pub struct Received {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Its descriptors.
    pub fds: Vec<OwnedFd>,
}

/// What can be wrong with receiving.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// Nothing is there yet.
    #[error("no message is waiting")]
    WouldBlock,
    /// The other side is gone.
    #[error("the other side closed the connection")]
    Closed,
    /// Longer than `protocol::MAX_MESSAGE`, or too many descriptors.
    #[error("the message was cut: it is too long")]
    Cut,
    /// The call failed.
    #[error("receiving failed")]
    Failed(#[source] Errno),
}

/// Sends one message. Does not wait when the socket is non-blocking.
///
/// # Errors
/// Those of sendmsg(2); AGAIN when the other side has not read enough.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(other) => return Err(other),
        }
    }
}

/// Receives one message into `buffer`'s capacity.
///
/// # Errors
/// See [`ReceiveError`].
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Received, ReceiveError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(got) => break got,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Err(ReceiveError::WouldBlock),
            Err(Errno::CONNRESET | Errno::PIPE) => return Err(ReceiveError::Closed),
            Err(other) => return Err(ReceiveError::Failed(other)),
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(ReceiveError::Cut);
    }
    if got.bytes == 0 && fds.is_empty() {
        return Err(ReceiveError::Closed);
    }
    Ok(Received { bytes: buffer[..got.bytes].to_vec(), fds })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::os::fd::AsFd;

    #[test]
    fn bytes_and_descriptors_arrive_together() {
        let (a, b) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
                .unwrap();
        let mut buffer = vec![0; 64];
        assert!(matches!(receive(b.as_fd(), &mut buffer), Err(ReceiveError::WouldBlock)));
        send(a.as_fd(), b"hello", &[a.as_fd(), b.as_fd()]).unwrap();
        let got = receive(b.as_fd(), &mut buffer).unwrap();
        assert_eq!((got.bytes.as_slice(), got.fds.len()), (&b"hello"[..], 2));
        send(a.as_fd(), &[1; 100], &[]).unwrap();
        assert!(matches!(receive(b.as_fd(), &mut buffer), Err(ReceiveError::Cut)));
        drop(got);
        drop(a);
        assert!(matches!(receive(b.as_fd(), &mut buffer), Err(ReceiveError::Closed)));
    }
}
