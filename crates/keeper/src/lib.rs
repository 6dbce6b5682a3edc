//! The keeper: starts sandboxes and their commands, keeps their outputs flowing, and outlives the node agent.
//!
//! It is a process with one thread, so that it may fork freely, and it makes no decisions: the node tells it what to
//! start, and it remembers exits until the node has acknowledged them. This library is the keeper's inside and the
//! protocol that the node speaks with it; the program is `corral-keeper`.
//!
//! ```text
//! node ──seqpacket──▶ server ─▶ launch (sandbox: clone3, id maps, overlay) ─▶ setup (in the child, before PID 1)
//!   ▲                   │└────▶ spawn  (command: fork, cgroups, setns, fork) ─▶ confine, exec
//!   └── exits, progress ┴─▶ output (pipe ─splice─▶ log file)
//! ```
#![forbid(unsafe_code)]

mod confine;
pub mod filter;
pub mod kit;
pub mod launch;
pub mod log;
pub mod output;
pub mod protocol;
mod saved;
pub mod server;
mod setup;
pub use saved::{Restored, Saved};
pub use setup::{Hidden, enter_private_root};
pub use spawn::CONTROL_FD;
mod spawn;
pub mod table;
pub mod terminals;
pub mod wire;
