//! The store, as a reader needs it: opened when it can be, and asked until an answer comes or the reader is out of time.
//!
//! A store that has nothing at all where chunks and tables of places lie is one whose place is empty: a mount that is
//! missing, most often. It counts as one that does not answer. In a store that is there an object that is missing is
//! the answer.

use bytes::Bytes;
use corral_store::{ErrorKind, Key, Store, StoreConfig, StoreError, holds_any};
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
        self.insist(key, until, |store| {
            let range = range.clone();
            async move { store.get_range(key, range).await }
        })
        .await
    }

    /// A small object, asked for until the deadline.
    pub(crate) async fn get(&self, key: &Key, most: u64, until: Instant) -> Result<Bytes, SourceError> {
        self.insist(key, until, |store| async move { store.get(key, most).await }).await
    }

    /// A small object that may be missing: an empty place of the store is none, too.
    pub(crate) async fn find(&self, key: &Key, most: u64, until: Instant) -> Result<Option<Bytes>, SourceError> {
        let found = |store: Arc<dyn Store>| async move {
            match store.get(key, most).await {
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                got => got.map(Some),
            }
        };
        self.insist(key, until, found).await
    }

    /// Writes a small object, once.
    pub(crate) async fn put(&self, key: &Key, bytes: Bytes) -> Result<(), StoreError> {
        self.store().await?.put(key, bytes).await
    }

    async fn insist<T, F>(
        &self,
        key: &Key,
        until: Instant,
        call: impl Fn(Arc<dyn Store>) -> F,
    ) -> Result<T, SourceError>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        let (mut pause, mut cut) = (FIRST_PAUSE, 0);
        // What the store said last: the last try may be too short for an answer.
        let mut why = "the store does not answer".to_owned();
        loop {
            let answer = async {
                // Opening fails as if the configuration were wrong when a mount is missing.
                let store = self.store().await.map_err(|error| (true, error.to_string()))?;
                match call(Arc::clone(&store)).await {
                    Err(error) if error.kind() == ErrorKind::NotFound => Err(missing(&*store, key, &error).await),
                    Err(error) => {
                        cut += u32::from(error.kind() == ErrorKind::Corrupt);
                        let again = error.is_retryable() || error.kind() == ErrorKind::Denied;
                        Err((again && cut <= CUT_ANSWERS, error.to_string()))
                    }
                    Ok(got) => Ok(got),
                }
            };
            match timeout_at(until.min(Instant::now() + ONE_CALL), answer).await {
                Ok(Ok(got)) => return Ok(got),
                Ok(Err((false, why))) => return Err(SourceError::Final(why)),
                Ok(Err((true, said))) => why = said,
                Err(_) => {}
            }
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

/// What an object that is missing means: whether to ask again, and why.
async fn missing(store: &dyn Store, key: &Key, error: &StoreError) -> (bool, String) {
    let Some(Ok(kind)) = key.segments().next().map(Key::parse) else { return (false, error.to_string()) };
    match holds_any(store, &kind).await {
        Ok(true) => (false, error.to_string()),
        Ok(false) => (true, format!("{} has nothing below {kind}: its place is empty", store.describe())),
        Err(other) => (true, other.to_string()),
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let store = self.store.read().unwrap_or_else(PoisonError::into_inner);
        f.write_str(&store.as_ref().map_or_else(|| "not open".to_owned(), |s| s.describe()))
    }
}
