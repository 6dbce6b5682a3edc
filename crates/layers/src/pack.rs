//! Making a layer of a directory tree: its metadata, its data and its manifest. Equal trees give equal bytes.
//!
//! The tree must not change meanwhile. It is walked with one descriptor, so its depth does not matter.

mod collect;
mod content;

use crate::config::CancelFlag;
use crate::error::ImportError;
use crate::scrub::Scrub;
use content::Content;
use corral_format::BLOCK;
use corral_format::erofs::{self, TreeError};
use corral_format::manifest::Manifest;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

pub(crate) use collect::Tally;

/// A layer in files of its own, synced, not yet published.
#[derive(Debug)]
pub(crate) struct Packed {
    pub(crate) manifest: Manifest,
    pub(crate) meta: Vec<u8>,
    pub(crate) data: PathBuf,
    /// What was met.
    pub(crate) tally: Tally,
}

/// Makes a layer of the tree at `source`, with its data in the file `data`, which must not exist.
///
/// # Errors
/// The tree cannot be read, has something no layer holds, or the host refuses; `cancel` was set.
pub(crate) fn pack(source: &Path, data: &Path, scrub: &Scrub, cancel: &CancelFlag) -> Result<Packed, ImportError> {
    let io = |e| ImportError::io("make", data, e);
    let file = OpenOptions::new().create_new(true).write(true).open(data).map_err(io)?;
    // Written to the disk while the rest is read: otherwise one waits for the other.
    let (walked, chunks) = std::thread::scope(|scope| {
        let (enough, heard) = std::sync::mpsc::sync_channel(1);
        // An error of the kernel's is told once, so it is kept.
        let early = scope.spawn(|| heard.into_iter().try_for_each(|()| file.sync_data()));
        let mut content = Content::new(&file, enough);
        let walked = collect::collect(source, &mut content, scrub, cancel)?;
        let chunks = content.finish().map_err(io)?;
        match early.join() {
            Ok(synced) => synced.map_err(io)?,
            Err(panic) => std::panic::resume_unwind(panic),
        }
        Ok::<_, ImportError>((walked, chunks))
    })?;
    let blocks = chunks.iter().map(|(len, _)| u64::from(*len).div_ceil(BLOCK)).sum();
    let shown = |e: TreeError| ImportError::Unstorable { path: source.to_owned(), source: e };
    let meta = erofs::write(&walked.tree, blocks).map_err(shown)?;
    let manifest =
        Manifest::new(&meta, chunks).map_err(|e| ImportError::io("describe", source, std::io::Error::other(e)))?;
    file.sync_data().map_err(io)?;
    Ok(Packed { manifest, meta, data: data.to_owned(), tally: walked.tally })
}
