//! Small JSON records with a version and a checksum, written so that a crash leaves the old one or the new one.

use crate::error::StoreError;
use corral_api::digest::Digest;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope {
    version: u32,
    checksum: Digest,
    body: serde_json::Value,
}

/// Digest over the canonical JSON of a value: no spaces, keys of objects sorted.
pub(crate) fn canonical_digest(body: &serde_json::Value) -> Digest {
    // serde_json's map is ordered by key and its text of a value is unique.
    Digest::of(body.to_string().as_bytes())
}

/// Reads a record; `None` where there is none.
///
/// # Errors
/// It cannot be read, is of another version, or its checksum is wrong.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, StoreError> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(StoreError::io("read", path, e)),
    };
    let refuse = |reason: String| StoreError::Record { path: path.to_owned(), reason };
    let envelope: Envelope = serde_json::from_slice(&bytes).map_err(|e| refuse(e.to_string()))?;
    if envelope.version != VERSION {
        return Err(refuse(format!("version {} is not {VERSION}", envelope.version)));
    }
    if canonical_digest(&envelope.body) != envelope.checksum {
        return Err(refuse("checksum is wrong".to_owned()));
    }
    serde_json::from_value(envelope.body).map(Some).map_err(|e| refuse(e.to_string()))
}

/// Writes a record: a temporary file in `staging`, fsync, rename, fsync of the directory.
///
/// # Errors
/// The host refuses.
pub(crate) fn write<T: Serialize>(path: &Path, staging: &Path, body: &T) -> Result<(), StoreError> {
    let io = |e: io::Error| StoreError::io("write", path, e);
    let body = serde_json::to_value(body).map_err(|e| io(e.into()))?;
    let envelope = Envelope { version: VERSION, checksum: canonical_digest(&body), body };
    let mut file = tempfile::NamedTempFile::new_in(staging).map_err(io)?;
    file.write_all(&serde_json::to_vec(&envelope).map_err(|e| io(e.into()))?).map_err(io)?;
    file.as_file().sync_all().map_err(io)?;
    file.persist(path).map_err(|e| io(e.error))?;
    sync_parent(path)
}

/// Makes a rename or removal in a file's directory last.
///
/// # Errors
/// The host refuses.
pub(crate) fn sync_parent(path: &Path) -> Result<(), StoreError> {
    let parent = path.parent().unwrap_or(path);
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(|e| StoreError::io("sync", parent, e))
}
