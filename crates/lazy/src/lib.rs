//! Layers whose data is not wholly on this node: served to the kernel as files, fetched chunk by chunk when read.
//!
//! A layer lies in `ROOT/layers/HEX` as `docs/layer-format.md` describes ("On a node"). This crate offers one read-only
//! FUSE directory, `ROOT/lazy`, with a file for each layer that is as long as its data. The kernel's EROFS is mounted
//! from `meta` with that file as its device and direct I/O, so that what a sandbox reads arrives here as a read of that
//! file. Chunks that are here are answered from `data`; others come from the shared store, and are checked against
//! the manifest before anything else sees them.
//!
//! ```text
//! reader ─▶ EROFS ─▶ FUSE ─▶ server threads ─┬─ chunks here: pread(data), answered at once
//!                              ▲             └─ chunks missing ─▶ fetch ─▶ budget ─▶ store
//!            holder ───────────┘                                    └─ unpack, verify, write, mark, answer
//! ```
//!
//! Two processes, so that no reader ever sees the end of one: the [`holder`] holds the FUSE connection and starts the
//! [`server`] anew whenever it ends; requests that were under way are handed out again by the kernel. Everything the
//! server knows is on the disk or can be asked for again. The node talks to it by the [`client`], and keeps a
//! [`Lifeline`]: when both processes end at once it starts a holder that goes on with that.
#![forbid(unsafe_code)]

pub mod client;
pub mod control;
mod descriptors;
mod fetch;
mod fuse;
pub mod holder;
mod id;
mod kept;
mod layer;
mod lifeline;
pub mod options;
pub mod server;

pub use id::{IdError, LayerId};
pub use lifeline::Lifeline;

/// What handing over to another program of this crate takes: both must say the same.
pub const HANDOVER: &str = "corral-lazy handover 1";
