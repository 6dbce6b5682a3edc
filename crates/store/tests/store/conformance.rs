//! What every store keeps to.

use crate::server::Server;
use crate::{directory, key, listed, names, pattern};
use bytes::Bytes;
use corral_store::{Body, ErrorKind, Faults, Faulty, MAX_READ_BYTES, Put, RetryPolicy, Retrying, Store};
use futures_util::future::join_all;
use rustix::fs::{CWD, FileType, Mode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

/// Runs the whole suite against an empty store.
async fn conforms(store: &dyn Store) {
    store.check().await.expect("a store in order");
    assert!(names(store, None).await.is_empty(), "what a check writes is no object");
    objects(store).await;
    reads(store).await;
    listings(store).await;
    files(store).await;
    one_winner(store, 50, 64 << 10).await;
    // Above the size that S3 takes in parts.
    one_winner(store, 3, 9 << 20).await;
    assert_eq!(store.sweep(Duration::ZERO).await.expect("a sweep"), 0, "finished puts leave nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory() {
    let (_dir, store) = directory();
    conforms(&store).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket() {
    let server = Server::start().await;
    conforms(&server.store()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrappers_that_do_nothing() {
    let (_dir, store) = directory();
    let store =
        Retrying::new(Faulty::new(Arc::new(store) as Arc<dyn Store>, Faults::seeded(1)), RetryPolicy::default());
    conforms(&store).await;
}

async fn objects(store: &dyn Store) {
    let (name, first, second) = (key("objects/a.b_c-d/1"), pattern(1, 1000), pattern(2, 1001));
    assert_eq!(store.head(&name).await.expect("an answer"), None);
    assert_eq!(store.put_if_absent(&name, first.clone().into()).await.expect("a put"), Put::Created);
    assert_eq!(store.put_if_absent(&name, second.clone().into()).await.expect("a put"), Put::Existed);
    assert_eq!(store.get(&name, 1000).await.expect("the object"), first, "the first stays");
    let meta = store.head(&name).await.expect("an answer").expect("an object");
    assert_eq!(meta.size, 1000);
    let age = SystemTime::now().duration_since(meta.modified).unwrap_or_default();
    assert!(age < Duration::from_secs(60), "{age:?}");

    store.put(&name, second.clone()).await.expect("a put that replaces");
    assert_eq!(store.get(&name, 2000).await.expect("the object"), second);
    store.put(&key("objects/new"), Bytes::new()).await.expect("a put of nothing");
    assert_eq!(store.get(&key("objects/new"), 0).await.expect("the object"), Bytes::new());

    for name in [&name, &key("objects/new")] {
        store.delete(name).await.expect("a delete");
        store.delete(name).await.expect("a delete of nothing");
        assert_eq!(store.head(name).await.expect("an answer"), None);
    }
    store.delete(&key("no/such/directory/object")).await.expect("a delete of nothing");
    assert_eq!(store.put_if_absent(&name, first.into()).await.expect("a put"), Put::Created, "a deleted name is free");
    store.delete(&name).await.expect("a delete");
}

async fn reads(store: &dyn Store) {
    let (name, bytes) = (key("reads/object"), pattern(3, 300_000));
    store.put_if_absent(&name, bytes.clone().into()).await.expect("a put");
    for range in [0..1, 0..300_000, 1..131_073, 299_999..300_000, 150_000..150_000] {
        let got = store.get_range(&name, range.clone()).await.expect("the bytes");
        assert_eq!(got, bytes.slice(range.start as usize..range.end as usize), "{range:?}");
    }
    for range in [0..300_001, 299_999..300_001, 300_000..300_001, 900_000..900_010] {
        let error = store.get_range(&name, range.clone()).await.expect_err("bytes that are not there");
        assert_eq!((error.kind(), error.is_retryable()), (ErrorKind::Corrupt, false), "{range:?}: {error}");
    }
    #[expect(clippy::reversed_empty_ranges, reason = "it is what is refused")]
    for range in [5..4, 0..MAX_READ_BYTES + 1] {
        let error = store.get_range(&name, range.clone()).await.expect_err("no range");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{range:?}: {error}");
    }
    let error = store.get(&name, 299_999).await.expect_err("too long");
    assert_eq!((error.kind(), error.is_retryable()), (ErrorKind::Corrupt, false));
    for error in [
        store.get_range(&key("reads/none"), 0..1).await.expect_err("nothing there"),
        store.get(&key("reads/none"), 1).await.expect_err("nothing there"),
    ] {
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }
    store.delete(&name).await.expect("a delete");
}

async fn listings(store: &dyn Store) {
    let all = ["list/a", "list/b/1", "list/b/2", "list/b.c/1", "list/ba", "lists/x"];
    for name in all {
        store.put_if_absent(&key(name), pattern(4, name.len()).into()).await.expect("a put");
    }
    let (entries, _) = listed(store, Some("list")).await.expect("a listing");
    assert_eq!(entries.len(), 5, "a prefix is whole segments: {entries:?}");
    assert!(entries.iter().all(|entry| entry.meta.size == entry.key.as_str().len() as u64));
    assert_eq!(names(store, Some("list/b")).await, ["list/b/1", "list/b/2"]);
    assert_eq!(names(store, Some("list/a")).await, [""; 0], "an object is not below itself");
    assert_eq!(names(store, Some("none")).await, [""; 0]);
    let mut expected = all;
    expected.sort_unstable();
    assert_eq!(names(store, None).await, expected);
    for name in all {
        store.delete(&key(name)).await.expect("a delete");
    }
    assert_eq!(names(store, None).await, [""; 0]);
}

async fn files(store: &dyn Store) {
    let dir = tempfile::tempdir().expect("a directory");
    for (name, length) in [("empty", 0), ("small", 100_000), ("large", (20 << 20) + 1)] {
        let (path, bytes) = (dir.path().join(name), pattern(5, length));
        std::fs::write(&path, &bytes).expect("a file");
        let name = key(&format!("files/{name}"));
        assert_eq!(store.put_if_absent(&name, path.clone().into()).await.expect("a put"), Put::Created);
        assert_eq!(store.put_if_absent(&name, path.into()).await.expect("a put"), Put::Existed);
        assert!(store.get(&name, length as u64).await.expect("the object") == bytes, "{name} is another");
        store.delete(&name).await.expect("a delete");
    }
    let fifo = dir.path().join("fifo");
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("a FIFO");
    for path in [dir.path().join("none"), dir.path().to_owned(), fifo] {
        let error = store.put_if_absent(&key("files/none"), path.into()).await.expect_err("no file");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    assert_eq!(store.head(&key("files/none")).await.expect("an answer"), None);
}

/// Many write one key at once while others read it.
async fn one_winner(store: &dyn Store, writers: u8, length: usize) {
    let name = key("race/object");
    let done = AtomicBool::new(false);
    let write = async {
        let bodies = (1..=writers).map(|writer| Bytes::from(vec![writer; length]));
        let puts = join_all(bodies.map(|body| store.put_if_absent(&name, Body::Bytes(body)))).await;
        done.store(true, Ordering::Relaxed);
        puts.into_iter().map(|put| put.expect("a put")).filter(|put| *put == Put::Created).count()
    };
    let read = async {
        let mut seen = Vec::new();
        loop {
            let last = done.load(Ordering::Relaxed);
            match store.get(&name, length as u64).await {
                Ok(bytes) => {
                    assert!(bytes.len() == length && bytes.iter().all(|b| *b == bytes[0]), "a part of an object");
                    seen.push(bytes[0]);
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "{error}"),
            }
            if last {
                seen.dedup();
                return seen;
            }
            tokio::task::yield_now().await;
        }
    };
    let (created, seen) = tokio::join!(write, read);
    assert_eq!(created, 1, "of {writers} writers");
    assert_eq!(seen.len(), 1, "readers saw more than one object: {seen:?}");
    assert_eq!(names(store, Some("race")).await, ["race/object"]);
    store.delete(&name).await.expect("a delete");
}
