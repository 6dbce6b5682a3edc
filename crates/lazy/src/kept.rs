//! What a server hands to the servers after it: numbers in a memory file that the holder keeps, also when it goes on as
//! another program.
//!
//! ```text
//! 0 flags agreed with the kernel · 8 crashes · 16 servers that stood still · 24 how the last server ended
//! ```
//! Each is 8 bytes, little endian; what was never written is zero.

use crate::control::{RestartCause, Restarts};
use rustix::io::{Errno, pread, pwrite};
use std::os::fd::AsFd;

const FLAGS: u64 = 0;
const CRASHED: u64 = 8;
const STILL: u64 = 16;
const LAST: u64 = 24;

/// What was agreed with the kernel; nothing before that.
pub(crate) fn flags(state: impl AsFd) -> u64 {
    number(state, FLAGS)
}

/// Keeps what was agreed with the kernel for the servers after this one, which are not asked.
pub(crate) fn keep_flags(state: impl AsFd, flags: u64) -> Result<(), Errno> {
    set(state, FLAGS, flags)
}

/// How many servers of this mount were replaced.
pub(crate) fn restarts(state: impl AsFd) -> Restarts {
    Restarts { crashed: number(state.as_fd(), CRASHED), still: number(state, STILL) }
}

/// Why the server before this one was replaced; nothing where it was not, or ended as it was told to.
pub(crate) fn last_end(state: impl AsFd) -> Option<RestartCause> {
    match number(state, LAST) {
        1 => Some(RestartCause::Crashed),
        2 => Some(RestartCause::Still),
        _ => None,
    }
}

/// Notes how a server ended, for the next one.
pub(crate) fn note_end(state: impl AsFd, end: Option<RestartCause>) -> Result<(), Errno> {
    let state = state.as_fd();
    let (at, code) = match end {
        Some(RestartCause::Crashed) => (CRASHED, 1),
        Some(RestartCause::Still) => (STILL, 2),
        None => return set(state, LAST, 0),
    };
    set(state, at, number(state, at).saturating_add(1))?;
    set(state, LAST, code)
}

fn number(state: impl AsFd, at: u64) -> u64 {
    let mut bytes = [0; 8];
    match pread(state, &mut bytes, at) {
        Ok(8) => u64::from_le_bytes(bytes),
        _ => 0,
    }
}

fn set(state: impl AsFd, at: u64, value: u64) -> Result<(), Errno> {
    pwrite(state, &value.to_le_bytes(), at).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_told_to_the_next() {
        let state = tempfile::tempfile().unwrap();
        assert_eq!((flags(&state), restarts(&state), last_end(&state)), (0, Restarts::default(), None));
        note_end(&state, Some(RestartCause::Crashed)).unwrap();
        note_end(&state, Some(RestartCause::Still)).unwrap();
        keep_flags(&state, 1 << 40).unwrap();
        assert_eq!((flags(&state), last_end(&state)), (1 << 40, Some(RestartCause::Still)));
        note_end(&state, None).unwrap();
        assert_eq!((restarts(&state), last_end(&state)), (Restarts { crashed: 1, still: 1 }, None));
    }
}
