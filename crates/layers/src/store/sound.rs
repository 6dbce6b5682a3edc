//! Whether a layer's files are what they are named by.

use super::LayerFiles;
use crate::error::StoreError;
use corral_api::digest::Digest;
use corral_format::erofs::superblock;
use corral_format::manifest::Manifest;
use corral_format::{BLOCK, CHUNK};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

fn damaged(digest: &Digest, reason: impl Into<String>) -> StoreError {
    StoreError::Damaged { digest: *digest, reason: reason.into() }
}

fn open(digest: &Digest, path: &Path, what: &str) -> Result<File, StoreError> {
    File::open(path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => damaged(digest, format!("its {what} is missing")),
        _ => StoreError::io("open", path, e),
    })
}

/// Reads the manifest, which names the layer.
///
/// # Errors
/// It is missing, or another layer's.
pub(super) fn manifest_of(digest: &Digest, dir: &Path) -> Result<Manifest, StoreError> {
    let path = dir.join("manifest");
    let mut bytes = Vec::new();
    let read = open(digest, &path, "manifest")?.read_to_end(&mut bytes);
    read.map_err(|e| StoreError::io("read", &path, e))?;
    let actual = Digest::of(&bytes);
    if actual != *digest {
        return Err(StoreError::DigestMismatch { expected: *digest, actual });
    }
    Manifest::decode(&bytes).map_err(|e| damaged(digest, e.to_string()))
}

/// Sizes of the files, and the first block of the metadata.
///
/// # Errors
/// What differs.
pub(super) fn check_shape(digest: &Digest, manifest: &Manifest, files: &LayerFiles) -> Result<(), StoreError> {
    let mut first = vec![0; BLOCK as usize];
    for (path, what, wanted) in [(&files.meta, "metadata", manifest.meta_len), (&files.data, "data", manifest.data_len)]
    {
        let file = open(digest, path, what)?;
        let found = file.metadata().map_err(|e| StoreError::io("read", path, e))?.len();
        if found != wanted {
            return Err(damaged(digest, format!("its {what} has {found} bytes instead of {wanted}")));
        }
        if what == "metadata" {
            file.read_exact_at(&mut first, 0).map_err(|e| StoreError::io("read", path, e))?;
            superblock::check(&first, found).map_err(|reason| damaged(digest, reason))?;
        }
    }
    Ok(())
}

/// Every byte of the metadata and of the chunks that are here.
///
/// # Errors
/// What differs.
pub(super) fn check_content(
    digest: &Digest,
    manifest: &Manifest,
    files: &LayerFiles,
    present: Option<&[bool]>,
) -> Result<(), StoreError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |e: io::Error| StoreError::io("read", &path, e)
    };
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(open(digest, &files.meta, "metadata")?).map_err(io(&files.meta))?;
    if *hasher.finalize().as_bytes() != manifest.meta_hash {
        return Err(damaged(digest, "its metadata was changed"));
    }
    let data = open(digest, &files.data, "data")?;
    let mut buffer = vec![0; CHUNK as usize];
    for (number, chunk) in manifest.chunks.iter().enumerate() {
        if present.is_some_and(|map| !map[number]) {
            continue;
        }
        let bytes = &mut buffer[..chunk.len as usize];
        data.read_exact_at(bytes, chunk.offset).map_err(io(&files.data))?;
        if *blake3::hash(bytes).as_bytes() != chunk.hash {
            return Err(damaged(digest, format!("chunk {number} of its data was changed")));
        }
    }
    Ok(())
}
