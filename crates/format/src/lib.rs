//! The layer format: what is described in `docs/layer-format.md`, byte for byte, and no I/O.
//!
//! [`erofs`] writes metadata images, [`manifest`] names a layer's content, [`places`] tells where chunks lie in a shared
//! store, [`trace`] which were read first, [`presence`] which are on this node;
//! [`unpack`] takes chunks out of what is stored of them.
#![forbid(unsafe_code)]

pub mod erofs;
pub mod manifest;
pub mod places;
pub mod presence;
mod read;
pub mod trace;
pub mod unpack;

/// Bytes of a block: chunks begin at its multiples.
pub const BLOCK: u64 = 4096;
/// Most bytes of a chunk, and what files are cut into.
pub const CHUNK: u64 = 128 << 10;

/// Why bytes are not of this format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// They begin otherwise.
    #[error("not a {0}")]
    Magic(&'static str),
    /// A version this program does not know.
    #[error("version {found} of a {what} is not known; this program knows {known}")]
    Version {
        /// What it is.
        what: &'static str,
        /// Its version.
        found: u32,
        /// The one that is known.
        known: u32,
    },
    /// They end too soon or go on too long.
    #[error("a {0} has the wrong length")]
    Length(&'static str),
    /// A value that cannot be.
    #[error("a {what} is not sound: {reason}")]
    Unsound {
        /// What it is.
        what: &'static str,
        /// What is wrong.
        reason: String,
    },
}
