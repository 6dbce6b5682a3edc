//! A store in a directory: a local one, or a mount of 3FS, CephFS or NFS that all nodes share.
//!
//! ```text
//! ROOT/a/b/c      the object a/b/c
//! ROOT/.tmp/…     what is being put; never visible as an object
//! ```
//!
//! Objects appear by a link(2) to a temporary file that is complete and synced, which every POSIX file system makes
//! atomic and refuses where the name is taken. Calls block, so they run on tokio's blocking threads, a bounded number
//! at once: a mount whose server is gone holds threads for as long as the kernel waits, while callers get `Timeout`.
//!
//! Files are opened beneath the root and without following links, so that neither a key nor a link that someone left
//! in the directory leads out of it.

mod files;
mod place;
mod sweep;
mod walk;

use crate::error::StoreError;
use crate::exact;
use crate::key::Key;
use crate::source;
use crate::store::{Body, ListStream, ObjectMeta, Put, Store};
use async_trait::async_trait;
use bytes::Bytes;
use files::Root;
use futures_util::{StreamExt, stream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Semaphore;

/// How a directory store is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PosixConfig {
    /// The directory; it must be there: one that is missing is a mount that is missing.
    pub path: PathBuf,
    /// How long a call may take; puts have a second more for each MiB.
    pub timeout: Duration,
    /// How many calls run at once; more wait.
    pub max_calls: usize,
    /// Read on the calling thread, which saves some microseconds: only for callers on threads of their own that may
    /// block. Such reads have no deadline.
    pub reads_on_caller: bool,
}

impl PosixConfig {
    /// A directory with usual settings: 30 seconds, 64 calls at once.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), timeout: Duration::from_secs(30), max_calls: 64, reads_on_caller: false }
    }
}

/// A store in a directory.
#[derive(Debug)]
pub struct PosixStore {
    root: Arc<Root>,
    slots: Arc<Semaphore>,
    config: PosixConfig,
}

impl PosixStore {
    /// Opens the store in a directory that is there. Blocks for a moment.
    ///
    /// # Errors
    /// The directory is missing, is none, or does not let this process in.
    pub fn open(config: PosixConfig) -> Result<Self, StoreError> {
        let root = Arc::new(Root::open(&config.path)?);
        Ok(Self { root, slots: Arc::new(Semaphore::new(config.max_calls.max(1))), config })
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.config.path
    }

    /// Runs a blocking call on a thread for such, within a deadline.
    async fn run<T: Send + 'static>(
        &self,
        op: &'static str,
        key: &str,
        limit: Duration,
        call: impl FnOnce(&Root) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let stopped = || StoreError::Stopped { op, key: key.to_owned() };
        let whole = async {
            let slot = Arc::clone(&self.slots).acquire_owned().await.map_err(|_| stopped())?;
            let root = Arc::clone(&self.root);
            let done = tokio::task::spawn_blocking(move || {
                // The slot goes with the thread, not with the caller that may have given up.
                let _slot = slot;
                root.heal(call(&root))
            });
            done.await.map_err(|_| stopped())?
        };
        let late = |_| StoreError::Timeout { op, key: key.to_owned(), after: limit };
        tokio::time::timeout(limit, whole).await.map_err(late)?
    }

    async fn read(
        &self,
        op: &'static str,
        key: &Key,
        call: impl FnOnce(&Root, &Key) -> Result<Bytes, StoreError> + Send + 'static,
    ) -> Result<Bytes, StoreError> {
        if self.config.reads_on_caller {
            return self.root.heal(call(&self.root, key));
        }
        let name = key.clone();
        self.run(op, key.as_str(), self.config.timeout, move |root| call(root, &name)).await
    }

    async fn place(&self, op: &'static str, key: &Key, body: Body, replace: bool) -> Result<Put, StoreError> {
        let given_up = GiveUp(Arc::new(AtomicBool::new(false)));
        let (flag, name) = (Arc::clone(&given_up.0), key.clone());
        let size = match &body {
            Body::Bytes(bytes) => bytes.len() as u64,
            // A look at local metadata: as short as opening the file is.
            Body::File(path) => path.metadata().map_err(|e| source::fault(path, e))?.len(),
        };
        let limit = self.config.timeout + Duration::from_secs(size >> 20);
        self.run(op, key.as_str(), limit, move |root| place::place(root, &name, &body, replace, &flag)).await
    }
}

/// Tells the thread of a put that its caller is gone. Where it is past the last look, the object appears.
struct GiveUp(Arc<AtomicBool>);

impl Drop for GiveUp {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[async_trait]
impl Store for PosixStore {
    async fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Bytes, StoreError> {
        let length = exact::length_of(key, &range)?;
        if length == 0 {
            return Ok(Bytes::new());
        }
        self.read("get_range", key, move |root, key| root.read_at(key, range.start, length)).await
    }

    async fn get(&self, key: &Key, max_len: u64) -> Result<Bytes, StoreError> {
        self.read("get", key, move |root, key| root.read_all(key, max_len)).await
    }

    async fn head(&self, key: &Key) -> Result<Option<ObjectMeta>, StoreError> {
        let name = key.clone();
        self.run("head", key.as_str(), self.config.timeout, move |root| root.meta(&name)).await
    }

    async fn put_if_absent(&self, key: &Key, body: Body) -> Result<Put, StoreError> {
        self.place("put_if_absent", key, body, false).await
    }

    async fn put(&self, key: &Key, bytes: Bytes) -> Result<(), StoreError> {
        self.place("put", key, Body::Bytes(bytes), true).await.map(drop)
    }

    fn list(&self, prefix: Option<&Key>) -> ListStream<'_> {
        let start = walk::Walk::below(prefix.cloned());
        stream::try_unfold(start, move |mut walk| async move {
            let step = move |root: &Root| {
                let page = walk.page(root)?;
                Ok((!page.is_empty()).then_some((page, walk)))
            };
            self.run("list", "", self.config.timeout, step).await
        })
        .boxed()
    }

    async fn delete(&self, key: &Key) -> Result<(), StoreError> {
        let name = key.clone();
        self.run("delete", key.as_str(), self.config.timeout, move |root| root.remove(&name)).await
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.run("check", "", self.config.timeout, place::rehearse).await
    }

    async fn sweep(&self, older_than: Duration) -> Result<u64, StoreError> {
        self.run("sweep", "", self.config.timeout, move |root| sweep::sweep(root, older_than)).await
    }

    fn describe(&self) -> String {
        format!("directory {}", self.config.path.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[tokio::test]
    async fn calls_that_find_no_place_end_in_time() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut config = PosixConfig::new(dir.path());
        (config.max_calls, config.timeout) = (1, Duration::from_millis(20));
        let store = PosixStore::open(config).expect("a store");
        let key = Key::parse("object").expect("a key");
        // As by a call that hangs in the kernel.
        let held = store.slots.acquire().await.expect("a slot");
        let error = store.put(&key, Bytes::new()).await.expect_err("no slot");
        assert_eq!((error.kind(), error.is_retryable()), (ErrorKind::Timeout, true));
        drop(held);
        store.put(&key, Bytes::new()).await.expect("a put");
    }
}
