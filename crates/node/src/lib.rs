//! The node agent: owns the sandboxes of one machine.
//!
//! ```text
//! http ──▶ lifecycle (create, pause, resume, stop) ──▶ runtime ──▶ keeper
//!   │         │                                          ▲
//!   ├──▶ commands (exec, sessions, output) ──────────────┤
//!   ├──▶ files ──────────────────────────────────────────┘
//!   └──▶ images ──▶ layers
//! keeper notices ─▶ notices ─▶ commands, lifecycle;   everything that must not be forgotten ─▶ ledger, events
//! ```
//! It may die and start again at any time: `adopt` takes over what the keepers still hold and removes the rest.
#![forbid(unsafe_code)]

mod adopt;
mod balance;
mod ballast;
mod cache;
mod clock;
mod commands;
mod config;
mod error;
mod events;
mod http;
mod keepers;
mod lazy;
mod ledger;
mod lifecycle;
mod metrics;
mod node;
mod notices;
mod reminder;
mod sandbox;
mod shared;
mod start;
mod upkeep;

pub use config::{NodeConfig, StoreUrl};
pub use corral_runtime::writable::WritableConfig;
pub use start::{Node, NodeHandle, StartError};
