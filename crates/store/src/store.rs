//! The contract that all stores keep, and the values that cross it.

use crate::error::{ErrorKind, StoreError};
use crate::key::Key;
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// What is known of an object without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectMeta {
    /// Its length in bytes.
    pub size: u64,
    /// When it was written, by the store's clock.
    pub modified: SystemTime,
}

/// One object of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListEntry {
    /// Its key.
    pub key: Key,
    /// What is known of it.
    pub meta: ObjectMeta,
}

/// A listing in pages of at most 1,000 entries, in no certain order. After an error it is over.
pub type ListStream<'a> = BoxStream<'a, Result<Vec<ListEntry>, StoreError>>;

/// What is to be put.
#[derive(Debug, Clone)]
pub enum Body {
    /// Bytes in memory.
    Bytes(Bytes),
    /// A local file, read in pieces: memory stays constant. It must not change meanwhile.
    File(PathBuf),
}

impl From<Bytes> for Body {
    fn from(bytes: Bytes) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<PathBuf> for Body {
    fn from(path: PathBuf) -> Self {
        Self::File(path)
    }
}

/// What became of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// This call created the object.
    Created,
    /// The object was there, and is untouched. An earlier try of the same call may have made it.
    Existed,
}

/// A store of objects. All calls may be dropped at any time: what was being put then appears whole or not at all.
#[async_trait]
pub trait Store: Send + Sync {
    /// The bytes of a range of an object: exactly as many as asked for. An empty range is answered without a look.
    ///
    /// # Errors
    /// There is no such object; it ends before the range does, or the answer was cut (`Corrupt`); the range is over
    /// [`MAX_READ_BYTES`](crate::MAX_READ_BYTES) or ends before it begins (`Invalid`); the store fails.
    async fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Bytes, StoreError>;

    /// A whole object of at most `max_len` bytes: for small ones.
    ///
    /// # Errors
    /// There is no such object; it is longer than `max_len`, or the answer was cut (`Corrupt`); the store fails.
    async fn get(&self, key: &Key, max_len: u64) -> Result<Bytes, StoreError>;

    /// Size and time of an object, or `None` where there is none. A bucket that is not there cannot be told from that
    /// here: see [`Store::check`].
    ///
    /// # Errors
    /// The store fails.
    async fn head(&self, key: &Key) -> Result<Option<ObjectMeta>, StoreError>;

    /// Creates an object unless there is one of that key. When this returns, the object is durable and visible to all.
    ///
    /// # Errors
    /// The body cannot be read, the store fails, or it cannot put conditionally (`Unsupported`). After `Timeout` and
    /// `Unavailable` the object may be there.
    async fn put_if_absent(&self, key: &Key, body: Body) -> Result<Put, StoreError>;

    /// Creates or replaces a small object. Readers see the old bytes or the new.
    ///
    /// # Errors
    /// The store fails. After `Timeout` and `Unavailable` the object may have been replaced.
    async fn put(&self, key: &Key, bytes: Bytes) -> Result<(), StoreError>;

    /// All objects whose keys lie below `prefix` (whole segments), or all there are. Objects that come and go meanwhile
    /// may be in it or not.
    fn list(&self, prefix: Option<&Key>) -> ListStream<'_>;

    /// Removes an object; none is well too. A crash of the store's host may bring it back.
    ///
    /// # Errors
    /// The store fails.
    async fn delete(&self, key: &Key) -> Result<(), StoreError>;

    /// Whether the store can be reached, lets this process in, and does all that is needed of it. Writes a trifle.
    ///
    /// # Errors
    /// It does not, and why.
    async fn check(&self) -> Result<(), StoreError>;

    /// Removes what interrupted puts left that nobody touched for `older_than`; tells how many. What is left is never
    /// visible as an object. S3 cannot be asked for this here: a lifecycle rule of the bucket does it
    /// (`AbortIncompleteMultipartUpload`).
    ///
    /// # Errors
    /// The store fails.
    async fn sweep(&self, older_than: Duration) -> Result<u64, StoreError>;

    /// What and where the store is, for logs: without secrets.
    fn describe(&self) -> String;
}

/// Whether a store has any object below a prefix. One that has nothing where it should have much is most often a mount
/// that is missing, or a bucket that is another.
///
/// # Errors
/// The store fails.
pub async fn holds_any(store: &dyn Store, prefix: &Key) -> Result<bool, StoreError> {
    match store.list(Some(prefix)).next().await {
        Some(Ok(page)) => Ok(!page.is_empty()),
        Some(Err(error)) if error.kind() != ErrorKind::NotFound => Err(error),
        Some(Err(_)) | None => Ok(false),
    }
}

#[async_trait]
impl<S: Store + ?Sized> Store for Arc<S> {
    async fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Bytes, StoreError> {
        (**self).get_range(key, range).await
    }

    async fn get(&self, key: &Key, max_len: u64) -> Result<Bytes, StoreError> {
        (**self).get(key, max_len).await
    }

    async fn head(&self, key: &Key) -> Result<Option<ObjectMeta>, StoreError> {
        (**self).head(key).await
    }

    async fn put_if_absent(&self, key: &Key, body: Body) -> Result<Put, StoreError> {
        (**self).put_if_absent(key, body).await
    }

    async fn put(&self, key: &Key, bytes: Bytes) -> Result<(), StoreError> {
        (**self).put(key, bytes).await
    }

    fn list(&self, prefix: Option<&Key>) -> ListStream<'_> {
        (**self).list(prefix)
    }

    async fn delete(&self, key: &Key) -> Result<(), StoreError> {
        (**self).delete(key).await
    }

    async fn check(&self) -> Result<(), StoreError> {
        (**self).check().await
    }

    async fn sweep(&self, older_than: Duration) -> Result<u64, StoreError> {
        (**self).sweep(older_than).await
    }

    fn describe(&self) -> String {
        (**self).describe()
    }
}
