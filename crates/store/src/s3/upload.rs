//! Large objects: uploaded in parts, visible when completed.
//!
//! ```text
//! head ─ there ─▶ Existed
//!   └ create upload ─▶ parts, some at once ─▶ complete if none match ─▶ Created
//!                        └─ failed, dropped ──────────┴─▶ abort
//! ```

use super::{PART_BYTES, S3Store, answers};
use crate::error::{ErrorKind, StoreError};
use crate::key::Key;
use crate::source;
use crate::store::{Body, Put, Store};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{MultipartId, PutPayload};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Parts in flight: with their size this bounds memory.
const PARTS_AT_ONCE: usize = 4;
/// Most parts of an upload (S3's limit is 10,000).
const MAX_PARTS: u64 = 9_000;

/// Where the bytes come from.
#[derive(Debug, Clone)]
pub(super) enum Source {
    Bytes(Bytes),
    File { file: Arc<File>, path: PathBuf, size: u64 },
}

impl Source {
    pub(super) async fn open(body: Body) -> Result<Self, StoreError> {
        let path = match body {
            Body::Bytes(bytes) => return Ok(Self::Bytes(bytes)),
            Body::File(path) => path,
        };
        blocking(path, |path| {
            let (file, size) = source::open(path)?;
            Ok(Self::File { file: Arc::new(file), path: path.clone(), size })
        })
        .await
    }

    pub(super) fn size(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File { size, .. } => *size,
        }
    }

    /// The bytes of a range that lies within.
    pub(super) async fn piece(&self, range: Range<u64>) -> Result<Bytes, StoreError> {
        let (file, path) = match self {
            Self::Bytes(bytes) => return Ok(bytes.slice(range.start as usize..range.end as usize)),
            Self::File { file, path, .. } => (Arc::clone(file), path.clone()),
        };
        blocking(path, move |path| {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            file.read_exact_at(&mut bytes, range.start).map_err(|e| source::fault(path, e))?;
            Ok(Bytes::from(bytes))
        })
        .await
    }
}

async fn blocking<T: Send + 'static>(
    path: PathBuf,
    call: impl FnOnce(&PathBuf) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let name = path.clone();
    let done = tokio::task::spawn_blocking(move || call(&path)).await;
    done.map_err(|_| StoreError::Stopped { op: "put_if_absent", key: name.display().to_string() })?
}

/// An upload that is aborted unless it was completed.
struct Upload<'a> {
    store: &'a S3Store,
    path: Path,
    id: MultipartId,
    open: bool,
}

impl Upload<'_> {
    async fn abort(&mut self) {
        self.open = false;
        let aborted =
            self.store.call("abort", self.path.as_ref(), self.store.client.abort_multipart(&self.path, &self.id));
        if let Err(error) = aborted.await {
            tracing::warn!(%error, "parts of a failed upload stay until the bucket's lifecycle rule removes them");
        }
    }
}

impl Drop for Upload<'_> {
    /// The caller gave up: the parts are removed in a task, where there still is a runtime.
    fn drop(&mut self) {
        if let (true, Ok(runtime)) = (self.open, tokio::runtime::Handle::try_current()) {
            let (store, path, id) = (self.store.clone(), self.path.clone(), self.id.clone());
            runtime.spawn(async move { Upload { store: &store, path, id, open: true }.abort().await });
        }
    }
}

impl S3Store {
    /// Uploads a large object, unless it is there.
    pub(super) async fn upload(&self, key: &Key, source: &Source) -> Result<Put, StoreError> {
        self.ensure_conditional_upload().await?;
        // The condition is looked at in the end only: do not send for nothing.
        if self.head(key).await?.is_some() {
            return Ok(Put::Existed);
        }
        let path = self.path(key);
        let id = self.call("put_if_absent", key.as_str(), self.client.create_multipart(&path)).await?;
        let mut upload = Upload { store: self, path, id, open: true };
        let done = self.send(key, source, &upload).await;
        if done.is_ok() {
            upload.open = false;
            return Ok(Put::Created);
        }
        upload.abort().await;
        match done {
            // Taken, or completed by a try whose answer was lost.
            Err(error) if answers::is_taken(&error) || error.kind() == ErrorKind::Invalid => {
                if self.head(key).await?.is_some() { Ok(Put::Existed) } else { Err(error) }
            }
            done => done.map(|()| Put::Created),
        }
    }

    async fn send(&self, key: &Key, source: &Source, upload: &Upload<'_>) -> Result<(), StoreError> {
        let part_bytes = PART_BYTES.max(source.size().div_ceil(MAX_PARTS));
        let parts: Vec<PartId> = stream::iter(0..source.size().div_ceil(part_bytes))
            .map(|index| async move {
                let start = index * part_bytes;
                let bytes = source.piece(start..source.size().min(start + part_bytes)).await?;
                let payload = PutPayload::from_bytes(bytes);
                let put = self.client.put_part(&upload.path, &upload.id, index as usize, payload);
                self.call("put_if_absent", key.as_str(), put).await
            })
            .buffered(PARTS_AT_ONCE)
            .try_collect()
            .await?;
        let complete = self.client.complete_multipart(&upload.path, &upload.id, parts);
        self.call("put_if_absent", key.as_str(), complete).await.map(drop)
    }
}
