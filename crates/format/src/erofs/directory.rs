//! Directory blocks: entries of fixed size, then their names, sorted so that the kernel finds them by halving.

use super::TreeError;
use crate::BLOCK;

/// Bytes of an entry without its name.
const ENTRY: u64 = 12;

/// Which entries go into which block.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Index after the last entry of each block.
    ends: Vec<usize>,
    /// Bytes of the directory.
    pub(crate) size: u64,
}

/// Distributes sorted names, `.` and `..` among them, over blocks.
pub(crate) fn plan<'a>(names: impl Iterator<Item = &'a [u8]>) -> Plan {
    let (mut ends, mut used, mut count) = (Vec::new(), 0, 0);
    for name in names {
        let bytes = ENTRY + name.len() as u64;
        if used + bytes > BLOCK {
            ends.push(count);
            used = 0;
        }
        used += bytes;
        count += 1;
    }
    let size = ends.len() as u64 * BLOCK + used;
    ends.push(count);
    Plan { ends, size }
}

/// An entry: name, number of its inode, and type.
pub(crate) type Entry<'a> = (&'a [u8], u64, u8);

impl Plan {
    /// The directory's bytes.
    pub(crate) fn encode(&self, entries: &[Entry<'_>]) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.size as usize);
        let mut from = 0;
        for end in &self.ends {
            out.resize(out.len().next_multiple_of(BLOCK as usize), 0);
            let block = &entries[from..*end];
            let mut name_at = block.len() as u64 * ENTRY;
            for (name, nid, kind) in block {
                out.extend(nid.to_le_bytes());
                out.extend((name_at as u16).to_le_bytes());
                out.extend([*kind, 0]);
                name_at += name.len() as u64;
            }
            block.iter().for_each(|(name, ..)| out.extend(*name));
            from = *end;
        }
        out
    }
}

/// The type of an entry (`EROFS_FT_*`) by the file's mode.
pub(crate) const fn type_of(mode: u16) -> u8 {
    match mode >> 12 {
        0o10 => 1,
        0o04 => 2,
        0o02 => 3,
        0o06 => 4,
        0o01 => 5,
        0o14 => 6,
        0o12 => 7,
        _ => 0,
    }
}

/// Checks a name.
pub(crate) fn check_name(name: &[u8]) -> Result<(), TreeError> {
    let bad = name.is_empty() || name.len() > 255 || name.contains(&b'/') || name.contains(&0);
    if bad || name == b"." || name == b".." {
        return Err(TreeError::Name(String::from_utf8_lossy(name).into_owned()));
    }
    Ok(())
}
