//! Reading integers off the front of a slice.

use crate::FormatError;

/// What is left of some bytes, and what they are called in errors.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    /// Checks the mark at the beginning and the version behind it.
    pub(crate) fn open(bytes: &'a [u8], what: &'static str, magic: &[u8; 8], known: u32) -> Result<Self, FormatError> {
        let mut reader = Self { rest: bytes, what };
        if reader.take::<8>().ok().as_ref() != Some(magic) {
            return Err(FormatError::Magic(what));
        }
        match reader.u32()? {
            found if found == known => Ok(reader),
            found => Err(FormatError::Version { what, found, known }),
        }
    }

    pub(crate) fn take<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(FormatError::Length(self.what))?;
        self.rest = rest;
        Ok(*head)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, FormatError> {
        self.take().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, FormatError> {
        self.take().map(u64::from_le_bytes)
    }

    /// Checks that exactly `bytes` are left, so that a count read from the input allocates no more than the input holds.
    pub(crate) fn left_is(&self, bytes: u64) -> Result<(), FormatError> {
        if self.rest.len() as u64 == bytes { Ok(()) } else { Err(FormatError::Length(self.what)) }
    }

    pub(crate) fn unsound(&self, reason: impl Into<String>) -> FormatError {
        FormatError::Unsound { what: self.what, reason: reason.into() }
    }
}

/// Packs a table into one zstd frame. Tables are small and read often, so the level is high.
pub(crate) fn pack(bytes: &[u8]) -> Vec<u8> {
    const LEVEL: i32 = 9;
    // Compressing memory into memory fails only for want of it.
    zstd::bulk::compress(bytes, LEVEL).unwrap_or_default()
}

/// Unpacks one frame of at most `most` bytes.
pub(crate) fn unpack(frame: &[u8], what: &'static str, most: usize) -> Result<Vec<u8>, FormatError> {
    zstd::bulk::decompress(frame, most).map_err(|e| FormatError::Unsound { what, reason: e.to_string() })
}
