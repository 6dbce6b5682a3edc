//! Tries again what may pass, within a deadline: for stores that do not do it themselves.
//!
//! [`S3Store`](crate::S3Store) retries requests on its own; to wrap it as well would multiply the attempts.

use crate::error::StoreError;
use crate::key::Key;
use crate::random::Rng;
use crate::store::{Body, ListStream, ObjectMeta, Put, Store};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use std::ops::Range;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How often and how long a call is tried.
#[derive(Debug, Clone, Copy)]
pub struct RetryPolicy {
    /// The longest wait before the second try; doubled for each one after. The wait is any time up to it ("full
    /// jitter"), so that nodes that failed together do not come back together.
    pub first_delay: Duration,
    /// What the doubling stops at.
    pub max_delay: Duration,
    /// No try begins later than this after the first.
    pub deadline: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            first_delay: Duration::from_millis(50),
            max_delay: Duration::from_secs(2),
            deadline: Duration::from_secs(20),
        }
    }
}

/// A store whose calls are repeated while they fail with what is retryable.
#[derive(Debug)]
pub struct Retrying<S> {
    inner: S,
    policy: RetryPolicy,
    rng: Mutex<Rng>,
}

impl<S: Store> Retrying<S> {
    /// Wraps a store.
    pub fn new(inner: S, policy: RetryPolicy) -> Self {
        Self { inner, policy, rng: Mutex::new(Rng::fresh()) }
    }

    /// The store inside.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    async fn retry<T, F>(&self, op: &'static str, call: impl Fn() -> F) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        let start = Instant::now();
        let mut bound = self.policy.first_delay;
        loop {
            let error = match call().await {
                Err(error) if error.is_retryable() => error,
                done => return done,
            };
            let delay = bound.mul_f64(self.fraction());
            if start.elapsed() + delay > self.policy.deadline {
                return Err(error);
            }
            tracing::debug!(op, %error, delay_ms = delay.as_millis() as u64, "trying again");
            tokio::time::sleep(delay).await;
            bound = (bound * 2).min(self.policy.max_delay);
        }
    }

    fn fraction(&self) -> f64 {
        self.rng.lock().unwrap_or_else(std::sync::PoisonError::into_inner).fraction()
    }
}

#[async_trait]
impl<S: Store> Store for Retrying<S> {
    async fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Bytes, StoreError> {
        self.retry("get_range", || self.inner.get_range(key, range.clone())).await
    }

    async fn get(&self, key: &Key, max_len: u64) -> Result<Bytes, StoreError> {
        self.retry("get", || self.inner.get(key, max_len)).await
    }

    async fn head(&self, key: &Key) -> Result<Option<ObjectMeta>, StoreError> {
        self.retry("head", || self.inner.head(key)).await
    }

    async fn put_if_absent(&self, key: &Key, body: Body) -> Result<Put, StoreError> {
        self.retry("put_if_absent", || self.inner.put_if_absent(key, body.clone())).await
    }

    async fn put(&self, key: &Key, bytes: Bytes) -> Result<(), StoreError> {
        self.retry("put", || self.inner.put(key, bytes.clone())).await
    }

    /// Only the first page is tried again: what comes after stands on what was given out.
    fn list(&self, prefix: Option<&Key>) -> ListStream<'_> {
        let prefix = prefix.cloned();
        let first = async move {
            let opened = self
                .retry("list", || {
                    let mut pages = self.inner.list(prefix.as_ref());
                    async move {
                        let first = pages.next().await.transpose()?;
                        Ok((first, pages))
                    }
                })
                .await;
            match opened {
                Ok((first, rest)) => stream::iter(first.map(Ok)).chain(rest).boxed(),
                Err(error) => stream::iter([Err(error)]).boxed(),
            }
        };
        stream::once(first).flatten().boxed()
    }

    async fn delete(&self, key: &Key) -> Result<(), StoreError> {
        self.retry("delete", || self.inner.delete(key)).await
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.retry("check", || self.inner.check()).await
    }

    async fn sweep(&self, older_than: Duration) -> Result<u64, StoreError> {
        self.retry("sweep", || self.inner.sweep(older_than)).await
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}
