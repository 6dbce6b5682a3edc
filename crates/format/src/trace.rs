//! Which chunks of a layer were read first, in order: what to fetch ahead next time.

use crate::FormatError;
use crate::read::{self, Reader};

const MAGIC: &[u8; 8] = b"CORRALTR";
const VERSION: u32 = 1;
const WHAT: &str = "trace";
/// Most entries of a trace.
pub const MAX_ENTRIES: usize = 1 << 16;

/// As one frame. What is beyond [`MAX_ENTRIES`] is left out.
pub fn pack(chunks: &[u32]) -> Vec<u8> {
    let kept = &chunks[..chunks.len().min(MAX_ENTRIES)];
    let mut out = Vec::with_capacity(16 + kept.len() * 4);
    out.extend(MAGIC);
    out.extend(VERSION.to_le_bytes());
    out.extend((kept.len() as u32).to_le_bytes());
    for chunk in kept {
        out.extend(chunk.to_le_bytes());
    }
    read::pack(&out)
}

/// Reads a frame. Numbers need not be those of chunks that are.
///
/// # Errors
/// It is no trace.
pub fn unpack(frame: &[u8]) -> Result<Vec<u32>, FormatError> {
    let bytes = read::unpack(frame, WHAT, 16 + MAX_ENTRIES * 4)?;
    let mut reader = Reader::open(&bytes, WHAT, MAGIC, VERSION)?;
    let count = reader.u32()?;
    reader.left_is(u64::from(count) * 4)?;
    (0..count).map(|_| reader.u32()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for made in [vec![], vec![7, 0, u32::MAX]] {
            assert_eq!(unpack(&pack(&made)).unwrap(), made);
        }
        let long: Vec<u32> = (0..MAX_ENTRIES as u32 + 5).collect();
        assert_eq!(unpack(&pack(&long)).unwrap(), long[..MAX_ENTRIES]);
        assert!(unpack(b"").is_err());
        assert!(unpack(&read::pack(b"CORRALTR\x01\0\0\0\x09\0\0\0")).is_err());
    }
}
