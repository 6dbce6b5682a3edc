//! One sandbox through one backend: making it, starting commands in it, its files, its limits and its end.
//!
//! `container` is the backend of this crate; it drives the keeper (`keeper_link`), cgroups, writable layers and file
//! workers. What is shared by backends to come stands beside it: logs and users. Nothing here decides who may start
//! what, or remembers anything over a restart: that is the node's.
#![forbid(unsafe_code)]

pub mod cgroup;
pub mod container;
pub mod error;
pub mod keeper_link;
pub mod keeper_process;
pub mod log_reader;
pub mod users;
pub mod writable;

pub use error::RuntimeError;
