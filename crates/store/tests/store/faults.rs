//! The wrappers: what is injected arrives, is repeatable, and is survived by retries.

use crate::{directory, key, listed, pattern};
use corral_store::{ErrorKind, Fault, Faults, Faulty, PosixStore, Put, RetryPolicy, Retrying, Store};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const SIZE: u64 = 10_000;

async fn faulty(seed: u64) -> (TempDir, Faults, Faulty<PosixStore>) {
    let (dir, store) = directory();
    store.put(&key("object"), pattern(1, SIZE as usize)).await.expect("a put");
    let faults = Faults::seeded(seed);
    let store = Faulty::new(store, faults.clone());
    (dir, faults, store)
}

fn quick() -> RetryPolicy {
    RetryPolicy {
        first_delay: Duration::from_millis(1),
        max_delay: Duration::from_millis(5),
        deadline: Duration::from_secs(20),
    }
}

#[tokio::test]
async fn cut_answers_are_noticed_and_damaged_ones_are_not() {
    let (_dir, faults, store) = faulty(1).await;
    let name = key("object");
    faults.script([Fault::Truncate, Fault::Truncate, Fault::Flip, Fault::None]);
    for error in
        [store.get_range(&name, 0..SIZE).await.expect_err("cut"), store.get(&name, SIZE).await.expect_err("cut")]
    {
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    }
    let whole = pattern(1, SIZE as usize);
    let damaged = store.get(&name, SIZE).await.expect("bytes");
    let wrong: u32 = damaged.iter().zip(&whole).map(|(a, b)| (a ^ b).count_ones()).sum();
    assert_eq!((damaged.len(), wrong), (whole.len(), 1), "one bit");
    assert_eq!(store.get(&name, SIZE).await.expect("bytes"), whole);
    let counts = faults.counts();
    assert_eq!((counts.calls, counts.gets, counts.faults), (4, 4, 3));
}

#[tokio::test]
async fn down_is_down_until_it_is_up() {
    let (_dir, faults, store) = faulty(1).await;
    faults.set_down(true);
    for error in [
        store.get_range(&key("object"), 0..1).await.expect_err("down"),
        store.put_if_absent(&key("new"), pattern(1, 1).into()).await.expect_err("down"),
        listed(&store, None).await.expect_err("down"),
        store.check().await.expect_err("down"),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    }
    faults.set_down(false);
    assert_eq!(store.head(&key("new")).await.expect("an answer"), None);
    assert_eq!(store.put_if_absent(&key("new"), pattern(1, 7).into()).await.expect("a put"), Put::Created);
    assert_eq!((faults.counts().puts, faults.counts().written_bytes), (1, 7));
}

#[tokio::test]
async fn the_same_seed_gives_the_same_faults() {
    let mut runs = Vec::new();
    for seed in [7, 7, 8] {
        let (_dir, faults, store) = faulty(seed).await;
        faults.set_fail(0.3, ErrorKind::Timeout);
        faults.set_truncate(0.3);
        faults.set_flip(0.3);
        let mut run = Vec::new();
        for _ in 0..50 {
            run.push(store.get(&key("object"), SIZE).await.map_err(|error| error.to_string()));
        }
        runs.push(run);
    }
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0], runs[2]);
}

#[tokio::test]
async fn latency_is_added() {
    let (_dir, faults, store) = faulty(1).await;
    faults.set_latency(Duration::from_millis(30));
    faults.script([Fault::Delay(Duration::from_millis(30))]);
    let start = Instant::now();
    store.get_range(&key("object"), 0..1).await.expect("a byte");
    assert!(start.elapsed() >= Duration::from_millis(60));
}

#[tokio::test]
async fn retries_outlast_what_passes_and_nothing_else() {
    let (_dir, faults, store) = faulty(3).await;
    let store = Retrying::new(store, quick());
    faults.set_fail(0.4, ErrorKind::Unavailable);
    faults.set_truncate(0.4);
    for _ in 0..30 {
        let got = store.get_range(&key("object"), 5..500).await.expect("the bytes");
        assert_eq!(got, pattern(1, SIZE as usize).slice(5..500));
        assert_eq!(listed(&store, None).await.expect("a listing").0.len(), 1);
    }
    assert!(faults.counts().faults > 10);

    faults.set_fail(0.0, ErrorKind::Unavailable);
    faults.set_truncate(0.0);
    for kind in [ErrorKind::Denied, ErrorKind::Full, ErrorKind::Invalid, ErrorKind::Unsupported, ErrorKind::NotFound] {
        let before = faults.counts().calls;
        faults.script([Fault::Fail(kind)]);
        assert_eq!(store.get(&key("object"), SIZE).await.expect_err("at once").kind(), kind);
        assert_eq!(faults.counts().calls, before + 1, "{kind:?} is not tried again");
    }
}

#[tokio::test]
async fn retries_end() {
    let (_dir, faults, store) = faulty(1).await;
    let store = Retrying::new(store, RetryPolicy { deadline: Duration::from_millis(50), ..quick() });
    faults.set_down(true);
    let start = Instant::now();
    let error = store.get(&key("object"), SIZE).await.expect_err("down");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(faults.counts().calls > 2);
}

#[tokio::test]
async fn a_put_whose_answer_is_lost_is_found_existing() {
    let (_dir, faults, store) = faulty(1).await;
    let store = Retrying::new(store, quick());
    faults.script([Fault::LoseAnswer]);
    assert_eq!(store.put_if_absent(&key("new"), pattern(2, 10).into()).await.expect("a put"), Put::Existed);
    assert_eq!(store.get(&key("new"), 10).await.expect("the object"), pattern(2, 10));
}
