//! Metadata images: EROFS without file data.
//!
//! Numbers are those of the kernel's `fs/erofs/erofs_fs.h`.

mod directory;
mod inode;
pub mod superblock;
mod tree;
mod writer;

pub use tree::{HOLE, Kind, Meta, Node, NodeId, Tree, Xattr};
pub use writer::write;

/// Where the superblock lies.
pub(crate) const SUPER_OFFSET: u64 = 1024;
/// Bytes of the superblock, and of a device slot behind it.
pub(crate) const SUPER_BYTES: u64 = 128;
/// Inodes are counted in slots of this size.
pub(crate) const SLOT: u64 = 32;
/// Bytes of an extended inode.
pub(crate) const INODE: u64 = 64;

/// Why a tree cannot be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    /// A name that no directory entry can have.
    #[error("the name {0:?} cannot be an entry")]
    Name(String),
    /// Two entries of one name.
    #[error("two entries have the name {0:?}")]
    Twice(String),
    /// Attributes that do not fit.
    #[error("extended attributes of {bytes} bytes do not fit")]
    Xattrs {
        /// What they would take.
        bytes: u64,
    },
    /// An attribute of a kind that EROFS has no number for.
    #[error("extended attribute {0:?} cannot be stored")]
    XattrName(String),
    /// A link longer than a page.
    #[error("a symbolic link of {0} bytes")]
    LinkTarget(usize),
    /// More than 32-bit numbers reach.
    #[error("the tree is too large: {0}")]
    TooLarge(&'static str),
}
