//! Nodes as the control plane sees them, and the bodies that only gateway and node exchange.

use crate::ids::NodeId;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A node, as it last said of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NodeStatus {
    /// Its id, the hint in the ids of its sandboxes.
    pub id: NodeId,
    /// Whether it takes new sandboxes.
    pub accepting: bool,
    /// Sandboxes that are not ended.
    pub live: u64,
    /// The most it admits.
    pub max_live: u64,
    /// Creates waiting for a start slot.
    pub queued: u64,
    /// Cores.
    pub cpus: u32,
    /// Memory of the host.
    pub memory_bytes: u64,
    /// Memory available on the host now.
    pub memory_available_bytes: u64,
    /// Size of the space for writable layers.
    pub disk_bytes: u64,
    /// Free there.
    pub disk_available_bytes: u64,
    /// Version of Corral.
    pub version: String,
}

/// Body of `POST /v1/images:import`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RegistryImport {
    /// Reference with its registry, such as `registry.example:5000/team/image:tag`.
    pub reference: String,
    /// Name in the catalogue; the reference where absent.
    #[serde(default)]
    pub name: Option<String>,
    /// User for the registry.
    #[serde(default)]
    pub username: Option<String>,
    /// Password or token for the registry.
    #[serde(default)]
    pub password: Option<String>,
    /// `os/architecture[/variant]`; `linux/amd64` where absent.
    #[serde(default)]
    pub platform: Option<String>,
    /// Speak HTTP without TLS. Allowed for loopback registries, elsewhere by the operator's configuration.
    #[serde(default)]
    pub plain_http: bool,
}
