//! The store, as a reader needs it: opened when it can be, and asked until an answer comes or the reader is out of time.

use bytes::Bytes;
use corral_store::{ErrorKind, Key, Store, StoreConfig, StoreError};
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout_at};

/// How often an answer that is cut is asked for again.
const CUT_ANSWERS: u32 = 5;
/// How long one call may take: a connection that hangs is worth another try.
const ONE_CALL: Duration = Duration::from_secs(20);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Where chunks come from.
pub struct Source {
    config: Option<StoreConfig>,
    store: RwLock<Option<Arc<dyn Store>>>,
}

/// Why nothing came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SourceError {
    /// Not in time.
    Late(String),
    /// It is of no use to ask again.
    Final(String),
}

impl Source {
    /// One that is open.
    pub fn of(store: Arc<dyn Store>) -> Self {
        Self { config: None, store: RwLock::new(Some(store)) }
    }

    /// One that is opened when it is first needed, and again until that succeeds.
    pub fn named(config: StoreConfig) -> Self {
        Self { config: Some(config), store: RwLock::new(None) }
    }

    async fn store(&self) -> Result<Arc<dyn Store>, StoreError> {
        let open = || self.store.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(store) = open() {
            return Ok(store);
        }
        let config = self.config.clone();
        let opened = tokio::task::spawn_blocking(move || config.map(|c| c.open())).await;
        match opened {
            Ok(Some(Ok(store))) => {
                *self.store.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&store));
                Ok(store)
            }
            Ok(Some(Err(error))) => Err(error),
            Ok(None) | Err(_) => Err(StoreError::Stopped { op: "open", key: String::new() }),
        }
    }

    /// Bytes of an object, asked for until the deadline.
    pub(crate) async fn get_range(&self, key: &Key, range: Range<u64>, until: Instant) -> Result<Bytes, SourceError> {
        self.insist(until, |store| {
            let range = range.clone();
            async move { store.get_range(key, range).await }
        })
        .await
    }

    /// A small object, asked for until the deadline.
    pub(crate) async fn get(&self, key: &Key, most: u64, until: Instant) -> Result<Bytes, SourceError> {
        self.insist(until, |store| async move { store.get(key, most).await }).await
    }

    /// Writes a small object, once.
    pub(crate) async fn put(&self, key: &Key, bytes: Bytes) -> Result<(), StoreError> {
        self.store().await?.put(key, bytes).await
    }

    async fn insist<F>(&self, until: Instant, call: impl Fn(Arc<dyn Store>) -> F) -> Result<Bytes, SourceError>
    where
        F: Future<Output = Result<Bytes, StoreError>>,
    {
        let (mut pause, mut cut) = (FIRST_PAUSE, 0);
        loop {
            let answer = async {
                // Opening fails as if the configuration were wrong when a mount is missing.
                let store = self.store().await.map_err(|error| (true, error))?;
                call(store).await.map_err(|error| (error.is_retryable() || error.kind() == ErrorKind::Denied, error))
            };
            let why = match timeout_at(until.min(Instant::now() + ONE_CALL), answer).await {
                Ok(Ok(bytes)) => return Ok(bytes),
                Ok(Err((again, error))) => {
                    cut += u32::from(error.kind() == ErrorKind::Corrupt);
                    if !again || cut > CUT_ANSWERS {
                        return Err(SourceError::Final(error.to_string()));
                    }
                    error.to_string()
                }
                Err(_) => "the store does not answer".to_owned(),
            };
            // The last try is at the deadline, not long before it.
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(SourceError::Late(why));
            }
            tracing::debug!(why, "asking the store again");
            sleep(pause.min(left)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        f.write_str(&store.as_ref().map_or_else(|| "not open".to_owned(), |s| s.describe()))
    }
}
