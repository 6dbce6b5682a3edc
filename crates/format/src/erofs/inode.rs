//! Extended inodes and their attributes.

use super::{INODE, Meta, TreeError, Xattr};

/// How a node's content is found (`EROFS_INODE_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// In blocks.
    Plain = 0,
    /// In blocks, the rest behind the inode.
    Inline = 2,
    /// By a table of chunks behind the inode.
    Chunks = 4,
}

/// Prefixes that are stored as numbers (`EROFS_XATTR_INDEX_*`); longer ones first.
const PREFIXES: [(u8, &[u8]); 5] = [
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (1, b"user."),
    (4, b"trusted."),
    (6, b"security."),
];
/// Header of the attributes behind an inode.
const XATTR_HEADER: u64 = 12;

/// Attributes as they are stored behind an inode; empty where there are none.
pub(crate) fn encode_xattrs(xattrs: &[Xattr]) -> Result<Vec<u8>, TreeError> {
    if xattrs.is_empty() {
        return Ok(Vec::new());
    }
    let mut entries = Vec::with_capacity(xattrs.len());
    for (name, value) in xattrs {
        let unknown = || TreeError::XattrName(String::from_utf8_lossy(name).into_owned());
        let (index, suffix) =
            PREFIXES.iter().find_map(|(i, p)| Some((*i, name.strip_prefix(*p)?))).ok_or_else(unknown)?;
        let named = u8::try_from(suffix.len()).map_err(|_| unknown())?;
        let size = u16::try_from(value.len()).map_err(|_| TreeError::Xattrs { bytes: value.len() as u64 })?;
        entries.push((index, suffix, value, named, size));
    }
    entries.sort_unstable();
    let mut out = vec![0; XATTR_HEADER as usize];
    for (index, suffix, value, named, size) in entries {
        out.extend([named, index]);
        out.extend(size.to_le_bytes());
        out.extend(suffix);
        out.extend(value);
        out.resize(out.len().next_multiple_of(4), 0);
    }
    // The count in the inode has 16 bits, in units of 4 bytes.
    let bytes = out.len() as u64;
    if (bytes - XATTR_HEADER) / 4 + 1 > u64::from(u16::MAX) { Err(TreeError::Xattrs { bytes }) } else { Ok(out) }
}

/// What differs from inode to inode.
#[derive(Debug)]
pub(crate) struct Inode<'a> {
    pub(crate) meta: &'a Meta,
    pub(crate) layout: Layout,
    pub(crate) size: u64,
    /// Block of the content, format of the chunk table, or device number.
    pub(crate) detail: u32,
    pub(crate) number: u32,
    pub(crate) links: u32,
    pub(crate) xattr_bytes: u64,
}

impl Inode<'_> {
    pub(crate) fn encode(&self) -> [u8; INODE as usize] {
        let mut out = [0; INODE as usize];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        // Bit 0: extended.
        put(0, &((self.layout as u16) << 1 | 1).to_le_bytes());
        let xattrs = if self.xattr_bytes == 0 { 0 } else { (self.xattr_bytes - XATTR_HEADER) / 4 + 1 };
        put(2, &(xattrs as u16).to_le_bytes());
        put(4, &self.meta.mode.to_le_bytes());
        put(8, &self.size.to_le_bytes());
        put(16, &self.detail.to_le_bytes());
        put(20, &self.number.to_le_bytes());
        put(24, &self.meta.uid.to_le_bytes());
        put(28, &self.meta.gid.to_le_bytes());
        put(32, &self.meta.mtime.0.to_le_bytes());
        put(40, &self.meta.mtime.1.to_le_bytes());
        put(44, &self.links.to_le_bytes());
        out
    }
}
