//! The descriptor of a FUSE connection. It is shared by the threads that read it and inherited by the next server.
//!
//! Each thread could have a queue of its own (`FUSE_DEV_IOC_CLONE`), but what was handed out through such a descriptor
//! fails when its process dies; what was handed out through this one stays with the holder's.

use super::wire;
use rustix::io::Errno;
use std::io::IoSlice;
use std::os::fd::OwnedFd;

/// A FUSE connection.
#[derive(Debug)]
pub struct Device(OwnedFd);

/// What came.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// A request of so many bytes.
    Request(usize),
    /// Nothing this time.
    Nothing,
    /// The connection is over: unmounted, or aborted.
    End,
}

impl Device {
    pub fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Waits for a request.
    ///
    /// # Errors
    /// Those of read(2) that do not pass by themselves.
    pub fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        match rustix::io::read(&self.0, buffer) {
            Ok(length) => Ok(Received::Request(length)),
            // ENOENT: it was interrupted before it was handed out.
            Err(Errno::INTR | Errno::NOENT | Errno::AGAIN) => Ok(Received::Nothing),
            Err(Errno::NODEV) => Ok(Received::End),
            Err(other) => Err(other),
        }
    }

    /// Answers with bytes.
    pub fn answer(&self, unique: u64, bytes: &[u8]) {
        self.send(&wire::answer(unique, bytes.len()), bytes);
    }

    /// Answers with an error.
    pub fn refuse(&self, unique: u64, errno: Errno) {
        self.send(&wire::refusal(unique, errno), &[]);
    }

    /// Asks for all that was handed out and not answered, by whoever read it.
    ///
    /// # Errors
    /// EINVAL where the kernel cannot do that (before Linux 6.9).
    pub fn resend(&self) -> Result<(), Errno> {
        rustix::io::write(&self.0, &wire::resend()).map(|_| ())
    }

    /// Has the kernel forget a name. Waits for lookups under way, so no thread that answers these may call it.
    ///
    /// # Errors
    /// Those of the notification; a name it does not know is well.
    pub fn invalidate(&self, name: &str) -> Result<(), Errno> {
        match rustix::io::write(&self.0, &wire::invalidate(name)) {
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(other) => Err(other),
        }
    }

    fn send(&self, header: &[u8], body: &[u8]) {
        match rustix::io::writev(&self.0, &[IoSlice::new(header), IoSlice::new(body)]) {
            // ENOENT: nobody waits any more.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => {}
            Err(error) => tracing::warn!(%error, "an answer was not taken"),
        }
    }
}
