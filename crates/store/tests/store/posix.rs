//! What is particular to directories: what lies there beside objects, and the ways out of it.

use crate::{directory, key, listed, names, pattern};
use corral_store::{ErrorKind, PosixConfig, PosixStore, Put, Store, StoreConfig};
use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

#[test]
fn a_directory_that_is_missing_is_not_made() {
    let dir = tempfile::tempdir().expect("a directory");
    let missing = dir.path().join("mount");
    let error = PosixStore::open(PosixConfig::new(&missing)).expect_err("nothing there");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("is not there"), "{error}");
    assert!(!missing.exists());
    fs::write(&missing, b"").expect("a file");
    let error = PosixStore::open(PosixConfig::new(&missing)).expect_err("no directory");
    assert!(error.to_string().contains("is not a directory"), "{error}");
}

#[tokio::test]
async fn a_mount_that_is_back_is_found() {
    let dir = tempfile::tempdir().expect("a directory");
    let (path, mounted) = (dir.path().join("mount"), dir.path().join("mounted"));
    fs::create_dir(&path).expect("a directory");
    let store = PosixStore::open(PosixConfig::new(&path)).expect("a store");
    let error = store.get(&key("a/b"), 10).await.expect_err("nothing there");
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    // As a mount appears: another directory of that name.
    fs::create_dir_all(mounted.join("a")).expect("directories");
    fs::write(mounted.join("a/b"), b"back").expect("an object");
    fs::rename(&mounted, &path).expect("a rename");
    assert_eq!(store.get(&key("a/b"), 10).await.expect("an object"), "back");
    assert_eq!(names(&store, None).await, ["a/b"]);
    // One that has not what is asked for is not gone over to.
    fs::rename(&path, &mounted).expect("a rename");
    fs::create_dir(&path).expect("a directory");
    assert_eq!(store.head(&key("a/c")).await.expect("an answer"), None);
    assert_eq!(store.get(&key("a/b"), 10).await.expect("still held"), "back");
}

#[tokio::test]
async fn links_lead_nowhere() {
    let (dir, store) = directory();
    let outside = tempfile::tempdir().expect("a directory");
    fs::write(outside.path().join("secret"), b"secret").expect("a file");
    symlink(outside.path(), dir.path().join("out")).expect("a link");
    symlink(outside.path().join("secret"), dir.path().join("file")).expect("a link");
    for name in ["out/secret", "file"] {
        store.get(&key(name), 100).await.expect_err("outside");
        store.get_range(&key(name), 0..1).await.expect_err("outside");
        assert!(!matches!(store.head(&key(name)).await, Ok(Some(_))), "outside");
    }
    store.put_if_absent(&key("out/new"), pattern(1, 10).into()).await.expect_err("outside");
    store.put(&key("out/new"), pattern(1, 10)).await.expect_err("outside");
    store.delete(&key("out/secret")).await.expect_err("outside");
    assert_eq!(names(&store, None).await, [""; 0]);
    assert_eq!(names(&store, Some("inside")).await, [""; 0]);
    assert_eq!(fs::read_dir(outside.path()).expect("a directory").count(), 1);
}

#[tokio::test]
async fn what_is_no_file_is_no_object() {
    let (dir, store) = directory();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        dir.path().join("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .expect("a FIFO");
    let error = store.get(&key("fifo"), 10).await.expect_err("a FIFO");
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert_eq!(store.head(&key("fifo")).await.expect("an answer"), None);
    assert_eq!(names(&store, None).await, [""; 0]);

    store.put(&key("a/b"), pattern(1, 10)).await.expect("a put");
    assert_eq!(store.get(&key("a"), 10).await.expect_err("a directory").kind(), ErrorKind::NotFound);
    for error in [
        store.put_if_absent(&key("a"), pattern(1, 10).into()).await.expect_err("a directory is there"),
        store.put_if_absent(&key("a/b/c"), pattern(1, 10).into()).await.expect_err("an object is above"),
    ] {
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

#[tokio::test]
async fn listings_come_in_pages_and_skip_what_is_no_key() {
    let (dir, store) = directory();
    for (below, count) in [("many/a", 1_500), ("many/b/c", 1_000)] {
        fs::create_dir_all(dir.path().join(below)).expect("a directory");
        for number in 0..count {
            fs::write(dir.path().join(below).join(format!("{number:04}")), b"x").expect("a file");
        }
    }
    for name in ["many/.hidden", "many/UPPER", "many/a/with space", "many/-dash"] {
        fs::write(dir.path().join(name), b"x").expect("a file");
    }
    let (entries, pages) = listed(&store, Some("many")).await.expect("a listing");
    assert_eq!((entries.len(), pages), (2_500, vec![1_000, 1_000, 500]));
}

#[tokio::test]
async fn the_sweep_goes_by_age() {
    let (dir, store) = directory();
    store.put_if_absent(&key("object"), pattern(1, 10).into()).await.expect("a put");
    let temps = dir.path().join(".tmp");
    let (old, new) = (temps.join("old"), temps.join("new"));
    for path in [&old, &new] {
        fs::write(path, b"half").expect("a file");
    }
    let hours_ago = std::time::SystemTime::now() - Duration::from_secs(7200);
    fs::File::options().write(true).open(&old).and_then(|f| f.set_modified(hours_ago)).expect("a time");
    assert_eq!(store.sweep(Duration::from_secs(3600)).await.expect("a sweep"), 1);
    assert!(!old.exists() && new.exists());
    assert_eq!(store.sweep(Duration::ZERO).await.expect("a sweep"), 1);
    assert_eq!(names(&store, None).await, ["object"]);
}

#[tokio::test]
async fn a_file_that_was_cut_is_noticed() {
    let (dir, store) = directory();
    store.put_if_absent(&key("object"), pattern(1, 1_000).into()).await.expect("a put");
    fs::File::options().write(true).open(dir.path().join("object")).and_then(|f| f.set_len(500)).expect("a cut");
    let error = store.get_range(&key("object"), 0..1_000).await.expect_err("half of it");
    assert_eq!(error.to_string(), "object ends before byte 1000");
}

#[tokio::test]
async fn a_put_that_is_dropped_shows_nothing_or_all() {
    let (dir, store) = directory();
    let source = tempfile::NamedTempFile::new().expect("a file");
    fs::write(source.path(), pattern(1, 40 << 20)).expect("a file");
    let name = key("object");
    for _ in 0..5 {
        // One that was dropped may have been past its last look.
        store.delete(&name).await.expect("a delete");
        let put = store.put_if_absent(&name, source.path().to_owned().into());
        tokio::pin!(put);
        // Polled until its thread is at work, then dropped.
        tokio::select! {
            biased;
            done = &mut put => assert!(done.is_ok(), "{done:?}"),
            () = at_work(dir.path()) => {}
        }
    }
    // The threads may be finishing; whatever they do, nothing half is seen, and the next put is well.
    let put = store.put_if_absent(&name, source.path().to_owned().into()).await.expect("a put");
    assert!(matches!(put, Put::Created | Put::Existed));
    assert!(store.get(&name, 40 << 20).await.expect("the object") == pattern(1, 40 << 20));
    assert_eq!(names(&store, None).await, ["object"]);
}

async fn at_work(dir: &std::path::Path) {
    while fs::read_dir(dir.join(".tmp")).map_or(0, Iterator::count) == 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_url_opens_it() {
    let (dir, _) = directory();
    let config: StoreConfig = format!("file://{}", dir.path().display()).parse().expect("a store");
    let store = config.open().expect("a store");
    store.check().await.expect("a store in order");
    store.put(&key("object"), pattern(1, 10)).await.expect("a put");
    assert_eq!(store.describe(), format!("directory {}", dir.path().display()));
    let mut inline = PosixConfig::new(dir.path());
    inline.reads_on_caller = true;
    let inline = PosixStore::open(inline).expect("a store");
    assert_eq!(inline.get_range(&key("object"), 2..5).await.expect("the bytes"), pattern(1, 10).slice(2..5));
}
