//! The lazy server and its holder against a real kernel: as root, in directories of their own.
#![allow(missing_docs, clippy::unwrap_used, clippy::large_futures)]

mod buckets;
mod clients;
mod evict;
mod inside;
mod power;
mod pressure;
mod processes;
/// The S3 server of the store's own tests.
#[path = "../../../store/tests/store/server.rs"]
#[allow(dead_code)]
mod s3;
mod soak;
mod stores;
mod support;
