//! Which chunks of a layer are on this node: a header and one byte for each chunk.

use crate::FormatError;

const MAGIC: &[u8; 8] = b"CORRALPR";
const WHAT: &str = "presence map";
/// Bytes before the first chunk's.
pub const HEADER: u64 = 16;
/// The chunk is here.
pub const PRESENT: u8 = 1;
/// An earlier boot of the host said that the chunk is here; it is yet to be checked.
pub const UNCHECKED: u8 = 2;

/// The header of a map that is written under this boot of the host.
pub fn header(boot_id: &str) -> [u8; HEADER as usize] {
    let mut out = [0; HEADER as usize];
    out[..8].copy_from_slice(MAGIC);
    out[8..].copy_from_slice(&blake3::hash(boot_id.trim().as_bytes()).as_bytes()[..8]);
    out
}

/// What a map says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Presence {
    /// Whether it was written under this boot: then what it says of a chunk holds; otherwise the chunk is checked first.
    pub trusted: bool,
    /// For each chunk, whether it is here.
    pub chunks: Vec<bool>,
}

/// Reads a map of so many chunks. One that is too short lacks what is missing.
///
/// # Errors
/// It is no presence map.
pub fn decode(bytes: &[u8], chunks: usize, boot_id: &str) -> Result<Presence, FormatError> {
    if bytes.len() < HEADER as usize || &bytes[..8] != MAGIC {
        return Err(FormatError::Magic(WHAT));
    }
    let trusted = bytes[..HEADER as usize] == header(boot_id);
    let mut found: Vec<bool> = bytes[HEADER as usize..].iter().take(chunks).map(|b| *b == PRESENT).collect();
    found.resize(chunks, false);
    Ok(Presence { trusted, chunks: found })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_believed_under_its_own_boot_only() {
        let mut bytes = header("boot-a\n").to_vec();
        bytes.extend([PRESENT, 0, 9, PRESENT]);
        let read = |boot| decode(&bytes, 6, boot).unwrap();
        assert_eq!(read("boot-a"), Presence { trusted: true, chunks: vec![true, false, false, true, false, false] });
        assert!(!read("boot-b").trusted);
        assert_eq!(decode(&bytes, 1, "boot-a").unwrap().chunks, [true]);
        assert_eq!(decode(&bytes[..15], 1, "boot-a"), Err(FormatError::Magic(WHAT)));
    }
}
