//! The file a stream is kept in: a head, and behind it a ring for the tail.
//!
//! ```text
//! 0        16          16+head            16+head+tail
//! ├ header ┼── head ────┼── ring (tail) ──┤
//! ```
//! A stream offset below `head_bytes` lies at `16 + offset`; one above lies in the ring at
//! `16 + head + (offset - head) % tail`. While the stream fits into the head the file's length tells its total; from
//! then on the header does (total, little endian, in its first 8 bytes).

use crate::protocol::LogBounds;
use rustix::io::Errno;
use std::os::fd::BorrowedFd;

/// Bytes before the head.
pub const HEADER_BYTES: u64 = 16;

/// Where in the file the byte at a stream offset lies, and how many bytes follow it there without a break.
pub fn place(bounds: LogBounds, offset: u64) -> (u64, u64) {
    if offset < bounds.head_bytes {
        return (HEADER_BYTES + offset, bounds.head_bytes - offset);
    }
    if bounds.tail_bytes == 0 {
        return (HEADER_BYTES + bounds.head_bytes, 0);
    }
    let at = (offset - bounds.head_bytes) % bounds.tail_bytes;
    (HEADER_BYTES + bounds.head_bytes + at, bounds.tail_bytes - at)
}

/// The range of stream offsets that is no longer kept once `total` bytes were written: `from..to`, empty when none.
pub fn dropped(bounds: LogBounds, total: u64) -> (u64, u64) {
    let to = total.saturating_sub(bounds.tail_bytes).max(bounds.head_bytes);
    if total <= bounds.head_bytes + bounds.tail_bytes {
        (bounds.head_bytes.min(total), bounds.head_bytes.min(total))
    } else {
        (bounds.head_bytes, to)
    }
}

/// Bytes of the stream, by the file alone.
///
/// # Errors
/// Those of fstat(2) and pread(2).
pub fn total_of(file: BorrowedFd<'_>, bounds: LogBounds) -> Result<u64, Errno> {
    let length = rustix::fs::fstat(file)?.st_size as u64;
    let by_length = length.saturating_sub(HEADER_BYTES);
    let mut header = [0u8; 8];
    let by_header = match rustix::io::pread(file, &mut header, 0)? {
        8 => u64::from_le_bytes(header),
        _ => 0,
    };
    Ok(if by_length < bounds.head_bytes { by_length } else { by_header.max(bounds.head_bytes.min(by_length)) })
}

/// Records the total in the header; needed only once the head is full.
///
/// # Errors
/// Those of pwrite(2).
pub fn record_total(file: BorrowedFd<'_>, total: u64) -> Result<(), Errno> {
    rustix::io::pwrite(file, &total.to_le_bytes(), 0).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    const B: LogBounds = LogBounds { head_bytes: 10, tail_bytes: 4 };

    #[test]
    fn head_then_ring() {
        assert_eq!(place(B, 0), (16, 10));
        assert_eq!(place(B, 9), (25, 1));
        assert_eq!(place(B, 10), (26, 4));
        assert_eq!(place(B, 13), (29, 1));
        assert_eq!(place(B, 14), (26, 4));
    }

    #[test]
    fn dropped_range() {
        for (total, want) in [(0, (0, 0)), (5, (5, 5)), (14, (10, 10)), (15, (10, 11)), (100, (10, 96))] {
            assert_eq!(dropped(B, total), want, "{total}");
        }
    }
}
