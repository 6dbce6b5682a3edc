//! Answers have exactly the length that was asked for: one check for all stores.

use crate::error::StoreError;
use crate::key::Key;
use bytes::Bytes;
use std::ops::Range;

/// The most that one read gives: a length from a damaged index must not make a process allocate without bound.
pub const MAX_READ_BYTES: u64 = 1 << 30;

/// The length of a range that may be read.
pub(crate) fn length_of(key: &Key, range: &Range<u64>) -> Result<u64, StoreError> {
    let Some(length) = range.end.checked_sub(range.start) else {
        return Err(invalid(key, format!("the range {}..{} ends before it begins", range.start, range.end)));
    };
    if length > MAX_READ_BYTES {
        return Err(invalid(key, format!("{length} bytes at once: at most {MAX_READ_BYTES} are read")));
    }
    Ok(length)
}

/// The bytes, where there are as many as expected.
pub(crate) fn exactly(key: &Key, expected: u64, bytes: Bytes) -> Result<Bytes, StoreError> {
    let got = bytes.len() as u64;
    if got == expected { Ok(bytes) } else { Err(wrong(key, expected, got)) }
}

pub(crate) fn wrong(key: &Key, expected: u64, got: u64) -> StoreError {
    StoreError::WrongLength { key: key.to_string(), expected, got }
}

/// Refuses an object that is larger than the caller takes.
pub(crate) fn at_most(key: &Key, size: u64, max: u64) -> Result<u64, StoreError> {
    let max = max.min(MAX_READ_BYTES);
    if size > max { Err(StoreError::TooLong { key: key.to_string(), size, max }) } else { Ok(size) }
}

/// Refuses a range that reaches beyond the end of an object of that size.
pub(crate) fn within(key: &Key, end: u64, size: u64) -> Result<(), StoreError> {
    if end > size { Err(past_end(key, end)) } else { Ok(()) }
}

pub(crate) fn past_end(key: &Key, end: u64) -> StoreError {
    StoreError::PastEnd { key: key.to_string(), end }
}

fn invalid(key: &Key, what: String) -> StoreError {
    StoreError::InvalidRange { key: key.to_string(), what }
}
