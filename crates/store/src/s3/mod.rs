//! A store in a bucket of an S3-compatible service.
//!
//! Objects are created with `If-None-Match: *`, the small ones by one request, the large ones in parts that become an
//! object when the upload is completed. A service that ignores the condition would let writers replace each other's
//! objects, so it is tried once before the first write (`probe.rs`), and the store refuses to write without it.
//!
//! Requests are retried by the `object_store` crate, within the deadline of the call. Nothing here retries on top but
//! the creating put, which that crate cannot know to be repeatable.

mod answers;
mod config;
mod connector;
mod probe;
mod upload;

pub use config::{S3Config, S3Credentials};

use crate::error::{ErrorKind, StoreError};
use crate::exact;
use crate::key::Key;
use crate::store::{Body, ListEntry, ListStream, ObjectMeta, Put, Store};
use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::aws::AmazonS3;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, GetResult, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use probe::Probes;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use upload::Source;

/// Largest object that is put by one request, and the smallest part of larger ones.
const PART_BYTES: u64 = 8 << 20;
/// How often a creating put is tried when the service neither made the object nor says it is there.
const CREATE_TRIES: u32 = 4;
/// Entries asked for at once; services give no more.
const PAGE: usize = 1000;

/// A store in a bucket.
#[derive(Debug, Clone)]
pub struct S3Store {
    client: Arc<AmazonS3>,
    config: Arc<S3Config>,
    probes: Arc<Probes>,
}

impl S3Store {
    /// Makes the store; nothing is sent yet ([`Store::check`] does).
    ///
    /// # Errors
    /// The configuration is contradictory, or there are no credentials where it says to look for them.
    pub fn open(config: S3Config) -> Result<Self, StoreError> {
        let client = Arc::new(config.client()?);
        Ok(Self { client, config: Arc::new(config), probes: Arc::default() })
    }

    fn path(&self, key: &Key) -> Path {
        Path::from(self.name_of(key.as_str()))
    }

    /// The full name in the bucket.
    fn name_of(&self, key: &str) -> String {
        match &self.config.prefix {
            Some(prefix) => format!("{prefix}/{key}"),
            None => key.to_owned(),
        }
    }

    /// Runs a call of the client within the deadline, and says what its error means.
    async fn call<T>(
        &self,
        op: &'static str,
        key: &str,
        call: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, StoreError> {
        let limit = self.config.timeout;
        match tokio::time::timeout(limit, connector::watched(call)).await {
            Err(_) => Err(StoreError::Timeout { op, key: key.to_owned(), after: limit }),
            Ok((Ok(done), _)) => Ok(done),
            Ok((Err(error), status)) => Err(answers::meaning(op, key, &error, status)),
        }
    }

    /// Asks for an object or a range of it and collects the answer.
    async fn fetch(
        &self,
        op: &'static str,
        key: &Key,
        range: Option<Range<u64>>,
        expect: impl Fn(&GetResult) -> Result<u64, StoreError>,
    ) -> Result<Bytes, StoreError> {
        let path = self.path(key);
        let options = GetOptions { range: range.map(GetRange::Bounded), ..GetOptions::default() };
        // Two errors: of the client, which must pass through `call` to get a meaning, and of what came.
        let whole = async {
            let answer = self.client.get_opts(&path, options).await?;
            let length = match expect(&answer) {
                Ok(length) => length,
                Err(error) => return Ok(Err(error)),
            };
            let mut bytes = BytesMut::with_capacity(length as usize);
            let mut stream = answer.into_stream();
            while let Some(piece) = stream.try_next().await? {
                if (bytes.len() + piece.len()) as u64 > length {
                    return Ok(Err(exact::wrong(key, length, (bytes.len() + piece.len()) as u64)));
                }
                if piece.len() as u64 == length {
                    return Ok(Ok(piece));
                }
                bytes.extend_from_slice(&piece);
            }
            Ok(exact::exactly(key, length, bytes.freeze()))
        };
        self.call(op, key.as_str(), whole).await?
    }

    /// Puts bytes by one request, unless the object is there.
    async fn create(&self, key: &Key, bytes: Bytes) -> Result<Put, StoreError> {
        let path = self.path(key);
        let mut last = None;
        for attempt in 0..CREATE_TRIES {
            if attempt > 0 {
                tokio::time::sleep(Duration::from_millis(50) * 2u32.pow(attempt)).await;
            }
            let options = PutOptions::from(PutMode::Create);
            let payload = PutPayload::from_bytes(bytes.clone());
            let put = self.call("put_if_absent", key.as_str(), self.client.put_opts(&path, payload, options)).await;
            match put {
                Ok(_) => return Ok(Put::Created),
                // 412, or 409 where another writer is at it (S3 asks to try again then): only a look can tell.
                Err(error) if answers::is_taken(&error) => {
                    if self.head(key).await?.is_some() {
                        return Ok(Put::Existed);
                    }
                    last = Some(error);
                }
                Err(error) if error.kind() == ErrorKind::Unavailable => last = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap_or_else(|| StoreError::Stopped { op: "put_if_absent", key: key.to_string() }))
    }

    async fn page(&self, prefix: &str, token: Option<String>) -> Result<(Vec<ListEntry>, Option<String>), StoreError> {
        let options =
            PaginatedListOptions { max_keys: Some(PAGE), page_token: token, ..PaginatedListOptions::default() };
        let asked = (!prefix.is_empty()).then_some(prefix);
        let answer = self.call("list", prefix, self.client.list_paginated(asked, options)).await?;
        let own = self.name_of("");
        let entries = answer.result.objects.into_iter().filter_map(|object| {
            // Names that are no keys are not of this store.
            let key = Key::parse(object.location.as_ref().strip_prefix(own.as_str())?).ok()?;
            Some(ListEntry { key, meta: ObjectMeta { size: object.size, modified: object.last_modified.into() } })
        });
        Ok((entries.collect(), answer.page_token))
    }
}

#[async_trait]
impl Store for S3Store {
    async fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Bytes, StoreError> {
        let length = exact::length_of(key, &range)?;
        if length == 0 {
            return Ok(Bytes::new());
        }
        let asked = range.clone();
        // A range that reaches beyond the end is answered with what there is, or with 416 where that is nothing.
        let expect = |answer: &GetResult| {
            exact::within(key, asked.end, answer.meta.size)?;
            match answer.range == asked {
                true => Ok(length),
                false => Err(exact::wrong(key, length, answer.range.end.saturating_sub(answer.range.start))),
            }
        };
        let end = range.end;
        match self.fetch("get_range", key, Some(range), expect).await {
            Err(StoreError::Service { status: Some(416), .. }) => Err(exact::past_end(key, end)),
            done => done,
        }
    }

    async fn get(&self, key: &Key, max_len: u64) -> Result<Bytes, StoreError> {
        self.fetch("get", key, None, |answer| exact::at_most(key, answer.meta.size, max_len)).await
    }

    async fn head(&self, key: &Key) -> Result<Option<ObjectMeta>, StoreError> {
        let path = self.path(key);
        match self.call("head", key.as_str(), self.client.head(&path)).await {
            Ok(meta) => Ok(Some(ObjectMeta { size: meta.size, modified: meta.last_modified.into() })),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn put_if_absent(&self, key: &Key, body: Body) -> Result<Put, StoreError> {
        self.ensure_conditional().await?;
        let source = Source::open(body).await?;
        if source.size() <= PART_BYTES {
            let bytes = source.piece(0..source.size()).await?;
            return self.create(key, bytes).await;
        }
        self.upload(key, &source).await
    }

    async fn put(&self, key: &Key, bytes: Bytes) -> Result<(), StoreError> {
        let path = self.path(key);
        self.call("put", key.as_str(), self.client.put(&path, PutPayload::from_bytes(bytes))).await.map(drop)
    }

    fn list(&self, prefix: Option<&Key>) -> ListStream<'_> {
        let prefix = self.name_of(&prefix.map(|key| format!("{key}/")).unwrap_or_default());
        let pages = stream::try_unfold((prefix, Some(None)), move |(prefix, next)| async move {
            let Some(token) = next else { return Ok(None) };
            let (entries, token) = self.page(&prefix, token).await?;
            Ok(Some((entries, (prefix, token.map(Some)))))
        });
        pages.try_filter(|page| std::future::ready(!page.is_empty())).boxed()
    }

    async fn delete(&self, key: &Key) -> Result<(), StoreError> {
        let path = self.path(key);
        match self.call("delete", key.as_str(), self.client.delete(&path)).await {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    async fn check(&self) -> Result<(), StoreError> {
        // A listing, because only its answer tells a bucket that is not there from an object that is not.
        self.page(&self.name_of(""), None).await?;
        self.ensure_conditional().await?;
        self.ensure_conditional_upload().await
    }

    async fn sweep(&self, _older_than: Duration) -> Result<u64, StoreError> {
        Ok(0)
    }

    fn describe(&self) -> String {
        self.config.describe()
    }
}
