//! What is kept of a holder and its server, so that readers outlive both.
//!
//! The kernel ends a FUSE connection when nobody has its descriptor open any more. Whoever has a copy keeps the readers
//! waiting, and can give it to a new holder, whose server is handed out again what was under way.

use crate::descriptors::open_as;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// Name of the memory file of [`crate::kept`].
pub(crate) const STATE: &str = "corral-lazy";

/// Copies of the descriptors that cannot be had anew.
#[derive(Debug)]
pub struct Lifeline {
    pub(crate) device: OwnedFd,
    pub(crate) state: OwnedFd,
}

impl Lifeline {
    /// Copies them from a process that serves: a holder or a server, which may be stopped.
    ///
    /// # Errors
    /// It is gone, or no such process.
    pub fn of(pid: i32) -> Result<Self, Errno> {
        let state = format!("/memfd:{STATE} (deleted)");
        let device = open_as(pid, |to| to == Path::new("/dev/fuse")).ok_or(Errno::SRCH)?;
        let state = open_as(pid, |to| to == Path::new(&state)).ok_or(Errno::SRCH)?;
        Self::copy(pid, [device, state])
    }

    /// Copies them from a process that says which they are.
    pub(crate) fn copy(pid: i32, [device, state]: [i32; 2]) -> Result<Self, Errno> {
        let from = pidfd_open(Pid::from_raw(pid).ok_or(Errno::SRCH)?, PidfdFlags::empty())?;
        let copy = |number| pidfd_getfd(&from, number, PidfdGetfdFlags::empty());
        Ok(Self { device: copy(device)?, state: copy(state)? })
    }

    /// Whether the connection is one still: not unmounted, and not aborted.
    pub fn is_connected(&self) -> bool {
        let mut device = [PollFd::new(&self.device, PollFlags::IN)];
        poll(&mut device, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok()
            && !device[0].revents().contains(PollFlags::ERR)
    }

    /// How another process is told where to copy them from.
    pub(crate) fn word(&self) -> String {
        format!("{}:{},{}", std::process::id(), self.device.as_raw_fd(), self.state.as_raw_fd())
    }

    /// Copies them from where a word says.
    pub(crate) fn from_word(word: &str) -> Result<Self, Errno> {
        let parse = || {
            let (pid, numbers) = word.split_once(':')?;
            let (device, state) = numbers.split_once(',')?;
            Some((pid.parse().ok()?, [device.parse().ok()?, state.parse().ok()?]))
        };
        let (pid, numbers) = parse().ok_or(Errno::INVAL)?;
        Self::copy(pid, numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_name_no_descriptors_are_refused() {
        for word in ["", "1", "1:2", "a:1,2", "1:a,2", ":,", "0:1,2"] {
            assert!(Lifeline::from_word(word).is_err(), "{word:?}");
        }
        let own = format!("{}:1000000,1000001", std::process::id());
        assert_eq!(Lifeline::from_word(&own).unwrap_err(), Errno::BADF);
    }
}
