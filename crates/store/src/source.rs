//! Local files that are put.

use crate::error::StoreError;
use std::fs::File;
use std::io;
use std::path::Path;

/// Opens a file that is to be put, and tells its size. Blocks.
pub(crate) fn open(path: &Path) -> Result<(File, u64), StoreError> {
    let fault = |source| fault(path, source);
    // Looked at first: to open a FIFO would wait for its other end.
    if !path.metadata().map_err(fault)?.is_file() {
        return Err(fault(io::Error::other("not a regular file")));
    }
    let file = File::open(path).map_err(fault)?;
    let size = file.metadata().map_err(fault)?.len();
    Ok((file, size))
}

pub(crate) fn fault(path: &Path, source: io::Error) -> StoreError {
    StoreError::Source { path: path.to_owned(), source }
}
