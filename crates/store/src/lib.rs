//! The shared object store: where layers are published for a whole cluster.
//!
//! A store holds objects, each a key and bytes that are there whole or not at all. It knows nothing of layers. One
//! trait, [`Store`], has two backends, and wrappers that compose with both:
//!
//! ```text
//!             ┌ PosixStore   a directory: local, 3FS, CephFS or NFS
//! dyn Store ◀─┼ S3Store      a bucket of any S3-compatible service with conditional writes
//!             ├ Retrying<S>  tries again what may pass: for backends that do not do it themselves
//!             └ Faulty<S>    delays, fails, cuts and damages answers: tests and benches
//! ```
//!
//! What all stores keep to:
//! - An object becomes visible whole and durable, or not at all, whenever its writer dies.
//! - Of the writers that put one key with [`Store::put_if_absent`], at most one is told [`Put::Created`]. None is when
//!   the answer to the one that created it was lost and it tried again.
//! - A read gives exactly the bytes asked for or an error: a short answer is [`ErrorKind::Corrupt`]. Whether the bytes
//!   are the right ones is not known here: callers check digests.
//! - Every call ends: it has a deadline, and what can be retried says so ([`StoreError::is_retryable`]).
//!
//! [`StoreConfig`] makes a store of a URL, `file:///dir` or `s3://bucket/prefix?…`.
#![forbid(unsafe_code)]

mod config;
mod error;
mod exact;
mod faulty;
mod key;
mod posix;
mod random;
mod retrying;
mod s3;
mod source;
mod store;

pub use config::StoreConfig;
pub use error::{ErrorKind, KeyFault, StoreError};
pub use exact::MAX_READ_BYTES;
pub use faulty::{Counts, Fault, Faults, Faulty};
pub use key::{Key, MAX_KEY_BYTES, MAX_SEGMENT_BYTES, MAX_SEGMENTS};
pub use posix::{PosixConfig, PosixStore};
pub use retrying::{RetryPolicy, Retrying};
pub use s3::{S3Config, S3Credentials, S3Store};
pub use store::{Body, ListEntry, ListStream, ObjectMeta, Put, Store, holds_any};
