//! What is particular to buckets: failures of the service and of the network, conditions, uploads in parts.

use crate::server::{BUCKET, SECRET, Server, Spoil};
use crate::{key, listed, names, pattern};
use corral_store::{ErrorKind, Put, S3Config, S3Credentials, S3Store, Store, StoreError};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::watch;

const LARGE: usize = 20 << 20;

fn open(config: S3Config) -> S3Store {
    S3Store::open(config).expect("a store")
}

async fn reached(counter: &watch::Sender<u64>, count: u64) {
    let wait = async { counter.subscribe().wait_for(|now| *now >= count).await.map(|_| ()) };
    tokio::time::timeout(Duration::from_secs(30), wait).await.expect("in time").expect("a counter");
}

/// All kinds of calls fail in the same way.
async fn all_fail(store: &dyn Store, kind: ErrorKind) -> StoreError {
    let name = key("some/object");
    let put = store.put_if_absent(&name, pattern(1, 10).into()).await.expect_err("a put");
    assert_eq!(put.kind(), kind, "{put}");
    for error in [
        store.get_range(&name, 0..10).await.expect_err("a range"),
        store.get(&name, 10).await.expect_err("an object"),
        store.head(&name).await.expect_err("a look"),
        store.put(&name, pattern(1, 10)).await.expect_err("a put"),
        store.delete(&name).await.expect_err("a delete"),
        store.check().await.expect_err("a check"),
        listed(store, None).await.expect_err("a listing"),
    ] {
        assert_eq!(error.kind(), kind, "{error}");
    }
    put
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_is_down() {
    let mut config = Server::start().await.config();
    config.timeout = Duration::from_secs(20);
    let start = Instant::now();
    let error = all_fail(&open(config), ErrorKind::Unavailable).await;
    assert!(error.is_retryable() && error.to_string().contains("cannot be reached"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_never_answers() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let mut config = Server::start().await.config();
    let address = listener.local_addr().expect("an address");
    config.endpoint = Some(format!("http://{address}").parse().expect("a URL"));
    config.timeout = Duration::from_millis(400);
    let start = Instant::now();
    all_fail(&open(config), ErrorKind::Timeout).await;
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials() {
    let server = Server::start().await;
    for (key_id, secret) in [("AKIDTEST", "wrong-secret"), ("AKIDOTHER", SECRET)] {
        let mut config = server.config();
        config.credentials = S3Credentials::Static { key_id: key_id.into(), secret: secret.into(), token: None };
        let error = all_fail(&open(config), ErrorKind::Denied).await;
        assert!(!error.to_string().contains(secret) && !error.is_retryable(), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_is_not_there() {
    let server = Server::start().await;
    let mut config = server.config();
    config.bucket = "nowhere".into();
    let error = open(config).check().await.expect_err("no bucket");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("the bucket does not exist"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_without_conditions() {
    // Without authentication, as the signature would notice the missing header.
    let server = Server::with(false).await;
    let mut config = server.config();
    config.credentials = S3Credentials::Anonymous;
    server.hook.unconditional.store(true, Ordering::Relaxed);
    for length in [10, LARGE] {
        let put = open(config.clone()).put_if_absent(&key("object"), pattern(1, length).into()).await;
        let error = put.expect_err("no condition");
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("If-None-Match"), "{error}");
    }
    assert_eq!(names(&open(config.clone()), None).await, [""; 0]);

    // One that knows the condition for puts alone still takes small objects.
    server.hook.unconditional.store(false, Ordering::Relaxed);
    let store = open(config);
    assert_eq!(store.put_if_absent(&key("small"), pattern(1, 10).into()).await.expect("a put"), Put::Created);
    server.hook.unconditional.store(true, Ordering::Relaxed);
    let error = store.put_if_absent(&key("large"), pattern(1, LARGE).into()).await.expect_err("no condition");
    assert!(error.to_string().contains("CompleteMultipartUpload"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn cut_answers() {
    let server = Server::start().await;
    let mut config = server.config();
    config.timeout = Duration::from_secs(5);
    let store = open(config);
    let (name, bytes) = (key("object"), pattern(1, 200_000));
    store.put_if_absent(&name, bytes.clone().into()).await.expect("a put");
    for (spoil, kinds) in [
        (Spoil::Short, [ErrorKind::Corrupt, ErrorKind::Corrupt]),
        // A broken connection is tried again, and at last it is the connection that is to blame.
        (Spoil::Cut, [ErrorKind::Unavailable, ErrorKind::Timeout]),
    ] {
        *server.hook.spoil.lock().expect("a lock") = Some(spoil);
        let error = store.get_range(&name, 10..150_000).await.expect_err("half of it");
        assert!(kinds.contains(&error.kind()) && error.is_retryable(), "{spoil:?}: {error}");
    }
    *server.hook.spoil.lock().expect("a lock") = None;
    assert_eq!(store.get_range(&name, 10..150_000).await.expect("the bytes"), bytes.slice(10..150_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_service_is_asked_again() {
    let server = Server::start().await;
    let store = server.store();
    store.check().await.expect("a store in order");
    for length in [100, LARGE] {
        server.hook.busy.store(2, Ordering::Relaxed);
        let (name, bytes) = (key(&format!("object-{length}")), pattern(1, length));
        assert_eq!(store.put_if_absent(&name, bytes.clone().into()).await.expect("a put"), Put::Created);
        server.hook.busy.store(2, Ordering::Relaxed);
        assert!(store.get_range(&name, 0..length as u64).await.expect("the bytes") == bytes);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_is_given_up() {
    let server = Server::start().await;
    let store = server.store();
    store.check().await.expect("a store in order");
    let (arrived, aborted) = (*server.hook.arrived.borrow(), *server.hook.aborted.borrow());
    server.hook.parts.forget_permits(1 << 20);
    server.hook.parts.add_permits(1);
    let task = {
        let store = store.clone();
        tokio::spawn(async move { store.put_if_absent(&key("large"), pattern(1, LARGE).into()).await })
    };
    // One part is stored, the others wait.
    reached(&server.hook.arrived, arrived + 3).await;
    task.abort();
    reached(&server.hook.aborted, aborted + 1).await;
    server.hook.parts.add_permits(1 << 20);
    assert_eq!(names(&store, None).await, [""; 0]);
    assert_eq!(store.head(&key("large")).await.expect("an answer"), None);
    let put = store.put_if_absent(&key("large"), pattern(2, LARGE).into()).await;
    assert_eq!(put.expect("a put"), Put::Created, "the name is free");
    assert!(store.get(&key("large"), LARGE as u64).await.expect("the object") == pattern(2, LARGE));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_loses_is_removed() {
    let server = Server::start().await;
    let store = server.store();
    store.check().await.expect("a store in order");
    let (arrived, aborted) = (*server.hook.arrived.borrow(), *server.hook.aborted.borrow());
    server.hook.parts.forget_permits(1 << 20);
    let task = {
        let store = store.clone();
        tokio::spawn(async move { store.put_if_absent(&key("large"), pattern(1, LARGE).into()).await })
    };
    reached(&server.hook.arrived, arrived + 3).await;
    // Another writer is done first.
    store.put(&key("large"), pattern(9, 10)).await.expect("a put");
    server.hook.parts.add_permits(1 << 20);
    assert_eq!(task.await.expect("a task").expect("a put"), Put::Existed);
    assert_eq!(*server.hook.aborted.borrow(), aborted + 1);
    assert_eq!(store.get(&key("large"), 10).await.expect("the object"), pattern(9, 10));
}

#[tokio::test(flavor = "multi_thread")]
async fn listings_come_in_pages() {
    let server = Server::start().await;
    let many = server.dir.path().join(BUCKET).join("some/prefix/many");
    std::fs::create_dir_all(&many).expect("a directory");
    for number in 0..2_500 {
        std::fs::write(many.join(format!("{number:04}")), b"x").expect("a file");
    }
    std::fs::write(many.join("No Key"), b"x").expect("a file");
    let (entries, pages) = listed(&server.store(), Some("many")).await.expect("a listing");
    assert_eq!((entries.len(), pages.len()), (2_500, 3), "{pages:?}");
}
