//! One output stream: from a pipe or terminal into its log, by splice where that works.

use crate::log;
use crate::protocol::LogBounds;
use corral_sys::process;
use rustix::io::Errno;
use rustix::pipe::{SpliceFlags, splice};
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Bytes taken from one stream before the others get their turn.
const TURN_BYTES: usize = 1 << 20;

/// A stream that is still open.
#[derive(Debug)]
pub struct Output {
    source: OwnedFd,
    log: OwnedFd,
    bounds: LogBounds,
    /// Whether the source is a terminal, which cannot be spliced on every kernel.
    terminal: bool,
    total: u64,
    lost: u64,
}

/// A stream with its descriptors by number.
#[derive(Debug, Serialize, Deserialize)]
pub struct SavedOutput {
    source: i32,
    log: i32,
    bounds: LogBounds,
    terminal: bool,
    total: u64,
    lost: u64,
}

/// What a turn found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Nothing more for now.
    Empty,
    /// There is more to come at once.
    More,
    /// Every writer is gone.
    Closed,
}

impl Output {
    /// Takes a non-blocking source and an empty log.
    pub fn new(source: OwnedFd, log: OwnedFd, bounds: LogBounds, terminal: bool) -> Self {
        Self { source, log, bounds, terminal, total: 0, lost: 0 }
    }

    /// The source, to wait for.
    pub fn source(&self) -> BorrowedFd<'_> {
        self.source.as_fd()
    }

    /// Source and log.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.source.as_fd(), self.log.as_fd()]
    }

    /// Describes it for the program that takes this one's place.
    pub fn save(&self) -> SavedOutput {
        let Self { source, log, bounds, terminal, total, lost } = self;
        let (source, log) = (source.as_raw_fd(), log.as_raw_fd());
        SavedOutput { source, log, bounds: *bounds, terminal: *terminal, total: *total, lost: *lost }
    }

    /// Takes the inherited descriptors of a saved one.
    ///
    /// # Errors
    /// When they are not there.
    pub fn restore(saved: SavedOutput) -> Result<Self, Errno> {
        let SavedOutput { source, log, bounds, terminal, total, lost } = saved;
        let (source, log) = (process::inherited(source)?, process::inherited(log)?);
        Ok(Self { source, log, bounds, terminal, total, lost })
    }

    /// Bytes taken so far, kept or not.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes that the log's filesystem refused.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Takes what is there, up to a turn's worth. Never waits.
    pub fn drain(&mut self) -> Turn {
        let mut taken = 0;
        let turn = loop {
            if taken >= TURN_BYTES {
                break Turn::More;
            }
            match self.step() {
                Ok(0) => break Turn::Closed,
                Ok(n) => taken += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break Turn::Empty,
                // A terminal whose last user is gone answers EIO.
                Err(_) => break Turn::Closed,
            }
        };
        if self.total > self.bounds.head_bytes && taken > 0 {
            // A header that cannot be written leaves the total to the exit notice.
            log::record_total(self.log.as_fd(), self.total).unwrap_or(());
        }
        turn
    }

    fn step(&mut self) -> Result<usize, Errno> {
        let (at, room) = log::place(self.bounds, self.total);
        if self.terminal || room == 0 {
            return self.copy(at, room);
        }
        let mut position = at;
        let want = room.min(TURN_BYTES as u64) as usize;
        match splice(&self.source, None, &self.log, Some(&mut position), want, SpliceFlags::NONBLOCK) {
            Ok(n) => {
                self.total += n as u64;
                Ok(n)
            }
            // The host's disk is full or the log cannot be written: the command must not hang for it.
            Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG | Errno::IO | Errno::INVAL) => self.copy(at, room),
            Err(other) => Err(other),
        }
    }

    fn copy(&mut self, at: u64, room: u64) -> Result<usize, Errno> {
        let mut buffer = [0u8; 16 << 10];
        let want = if room == 0 { buffer.len() } else { (room as usize).min(buffer.len()) };
        let n = rustix::io::read(&self.source, &mut buffer[..want])?;
        let mut written = 0;
        while room > 0 && written < n {
            match rustix::io::pwrite(&self.log, &buffer[written..n], at + written as u64) {
                Ok(0) => break,
                Ok(k) => written += k,
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
        if room > 0 {
            self.lost += (n - written) as u64;
        }
        self.total += n as u64;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::pipe::{PipeFlags, pipe_with};

    fn read_at(fd: &OwnedFd, at: u64, n: usize) -> Vec<u8> {
        let mut b = vec![0; n];
        let got = rustix::io::pread(fd, &mut b, at).unwrap();
        b.truncate(got);
        b
    }

    #[test]
    fn keeps_head_and_tail_and_counts_all() {
        let (r, w) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let log = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        let keep = rustix::io::dup(&log).unwrap();
        let bounds = LogBounds { head_bytes: 10, tail_bytes: 4 };
        let mut out = Output::new(r, log, bounds, false);
        assert_eq!(out.drain(), Turn::Empty);
        rustix::io::write(&w, b"0123456").unwrap();
        assert_eq!(out.drain(), Turn::Empty);
        assert_eq!(log::total_of(keep.as_fd(), bounds).unwrap(), 7);
        rustix::io::write(&w, b"789abcdefgh").unwrap();
        drop(w);
        assert_eq!(out.drain(), Turn::Closed);
        assert_eq!(out.total(), 18);
        assert_eq!(log::total_of(keep.as_fd(), bounds).unwrap(), 18);
        assert_eq!(read_at(&keep, 16, 10), b"0123456789");
        let tail: Vec<u8> = (14..18).flat_map(|o| read_at(&keep, log::place(bounds, o).0, 1)).collect();
        assert_eq!(tail, b"efgh");
    }

    #[test]
    fn a_log_that_refuses_does_not_stop_the_command() {
        let (r, w) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let full = rustix::fs::open("/dev/full", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).unwrap();
        let mut out = Output::new(r, full, LogBounds { head_bytes: 100, tail_bytes: 0 }, false);
        rustix::io::write(&w, b"hello").unwrap();
        drop(w);
        assert_eq!(out.drain(), Turn::Closed);
        assert_eq!((out.total(), out.lost()), (5, 5));
    }
}
