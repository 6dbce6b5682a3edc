//! The lazy server and its holder against a real kernel: as root, in directories of their own.
#![allow(missing_docs, clippy::unwrap_used, clippy::large_futures)]

mod clients;
mod evict;
mod inside;
mod power;
mod pressure;
mod processes;
mod stores;
mod support;
