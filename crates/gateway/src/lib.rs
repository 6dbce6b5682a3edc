//! The gateway: Corral's public HTTP API in front of the nodes.
//!
//! It authenticates, checks and names things; a node does the rest. Nothing here touches a sandbox but through
//! [`NodeChannel`], also when both run in one process. Bodies that may be large are streamed, never held.
//!
//! ```text
//! client ── HTTP ─→ edge (request id, key, metrics) ─→ api/* ─→ directory ─→ node channel ─→ node
//!                                                        └───→ catalogue (names, keys)
//! ```
#![forbid(unsafe_code)]

mod api;
mod build;
pub mod catalogue;
mod directory;
mod edge;
mod extract;
mod linger;
mod metrics;
pub mod node_channel;
mod octets;
mod only_tls;
mod openapi;
pub mod placement;
mod refusal;
mod serve;
mod state;
mod tunnel;
mod unsettled;

pub use catalogue::{Catalogue, CatalogueError, Listed, Page};
pub use node_channel::{NodeAddress, NodeChannel, NodeError};
pub use openapi::document as openapi_document;
pub use serve::{Gateway, ServeError, TlsFiles};
pub use state::GatewayConfig;
