//! A writer that is killed in the middle of a put leaves nothing that can be seen.
//!
//! The writer is this test program, started again to run [`writer`] alone with a store in its environment.

use crate::server::{BUCKET, KEY_ID, SECRET, Server};
use crate::{directory, key, listed, names, pattern};
use corral_store::{Store, StoreConfig};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const STORE: &str = "CORRAL_TEST_STORE";
const SIZE: usize = 20 << 20;

/// Puts one object after the other until it is killed. Without a store it has nothing to do.
#[tokio::test(flavor = "multi_thread")]
async fn writer() {
    let Ok(url) = std::env::var(STORE) else { return };
    let store = url.parse::<StoreConfig>().and_then(|config| config.open()).expect("a store");
    for number in 0.. {
        let name = key(&format!("objects/{number}"));
        store.put_if_absent(&name, pattern(1, SIZE).into()).await.expect("a put");
    }
}

fn start_writer(url: &str) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "killed::writer"])
        .env(STORE, url)
        .env("AWS_ACCESS_KEY_ID", KEY_ID)
        .env("AWS_SECRET_ACCESS_KEY", SECRET)
        .stdout(Stdio::null())
        .spawn()
        .expect("a writer")
}

fn kill(mut writer: Child) {
    writer.kill().expect("a signal");
    let status = writer.wait().expect("an end");
    assert!(!status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_directory() {
    let (dir, store) = directory();
    let temps = dir.path().join(".tmp");
    let mut left = 0;
    for _ in 0..3 {
        let writer = start_writer(&format!("file://{}", dir.path().display()));
        let half_written = || {
            let entries = std::fs::read_dir(&temps).into_iter().flatten().flatten();
            entries.filter_map(|entry| entry.metadata().ok()).any(|meta| meta.len() > 0 && meta.len() < SIZE as u64)
        };
        let wait = async {
            while !half_written() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), wait).await.expect("a put at work");
        kill(writer);
        let (entries, _) = listed(&store, None).await.expect("a listing");
        assert!(entries.iter().all(|entry| entry.meta.size == SIZE as u64), "{entries:?}");
        for entry in &entries {
            assert!(store.get(&entry.key, SIZE as u64).await.expect("the object") == pattern(1, SIZE));
            store.delete(&entry.key).await.expect("a delete");
        }
        left += store.sweep(Duration::ZERO).await.expect("a sweep");
        assert_eq!(store.sweep(Duration::ZERO).await.expect("a sweep"), 0);
    }
    // Where a kill came after the last byte and before the end, nothing is left: not every time.
    assert!(left > 0, "no put was interrupted");
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_bucket() {
    let server = Server::start().await;
    let store = server.store();
    store.check().await.expect("a store in order");
    let arrived = *server.hook.arrived.borrow();
    server.hook.parts.forget_permits(1 << 20);
    // The writer's own probe, and one part.
    server.hook.parts.add_permits(3);
    let writer = start_writer(&format!(
        "s3://{BUCKET}/some/prefix?endpoint=http://{}&path_style=true&allow_http=true",
        server.address
    ));
    let mut counter = server.hook.arrived.subscribe();
    let wait = counter.wait_for(|now| *now >= arrived + 5);
    tokio::time::timeout(Duration::from_secs(60), wait).await.expect("in time").expect("parts");
    kill(writer);
    server.hook.parts.add_permits(1 << 20);
    assert_eq!(names(&store, None).await, [""; 0]);
    assert_eq!(store.head(&key("objects/0")).await.expect("an answer"), None);
}
