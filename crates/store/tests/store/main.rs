//! Stores: one suite for all of them, against a directory and a real S3 server, and what is particular to each.

mod conformance;
mod faults;
mod killed;
mod posix;
mod s3;
mod server;

use bytes::Bytes;
use corral_store::{Key, ListEntry, PosixConfig, PosixStore, Store, StoreError};
use futures_util::TryStreamExt;
use tempfile::TempDir;

/// A key that the test knows to be one.
fn key(text: &str) -> Key {
    Key::parse(text).expect("a key")
}

/// Bytes that differ by position and seed, so that no piece stands for another.
fn pattern(seed: u8, length: usize) -> Bytes {
    (0..length).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ seed).collect()
}

/// All entries below a prefix, by key, and the sizes of the pages.
async fn listed(store: &dyn Store, prefix: Option<&str>) -> Result<(Vec<ListEntry>, Vec<usize>), StoreError> {
    let pages: Vec<Vec<ListEntry>> = store.list(prefix.map(key).as_ref()).try_collect().await?;
    let sizes = pages.iter().map(Vec::len).collect();
    let mut entries: Vec<ListEntry> = pages.into_iter().flatten().collect();
    entries.sort_by(|a, b| a.key.cmp(&b.key));
    Ok((entries, sizes))
}

async fn names(store: &dyn Store, prefix: Option<&str>) -> Vec<String> {
    let (entries, _) = listed(store, prefix).await.expect("a listing");
    entries.into_iter().map(|entry| entry.key.to_string()).collect()
}

/// A store in a directory of its own.
fn directory() -> (TempDir, PosixStore) {
    let dir = tempfile::tempdir().expect("a directory");
    let store = PosixStore::open(PosixConfig::new(dir.path())).expect("a store");
    (dir, store)
}
