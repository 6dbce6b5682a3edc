//! API keys, and the bodies that list the catalogue's records.

use crate::digest::Digest;
use crate::environment::EnvironmentRecord;
use crate::image::{ImageRecord, LayerRecord};
use crate::node::NodeStatus;
use crate::problem::Problem;
use crate::sandbox::{SandboxSpec, SandboxStatus};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The project of every record until projects can be made.
pub const DEFAULT_PROJECT: &str = "default";

/// Header by which the gateway tells a node whose request it forwards. Clients cannot set it.
pub const PROJECT_HEADER: &str = "corral-project";

/// Body of `POST /v1/keys`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KeySpec {
    /// What the key is for, 1–128 bytes.
    pub name: String,
}

/// A new API key: the only time its text is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewKey {
    /// Its id, to delete it by.
    pub id: String,
    /// What it is for.
    pub name: String,
    /// The key: `corral_` and 40 hex digits.
    pub key: String,
}

/// An API key as it is kept: without its text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeyRecord {
    /// Its id.
    pub id: String,
    /// What it is for.
    pub name: String,
    /// Whose requests it makes.
    pub project_id: String,
    /// Creation time, RFC 3339.
    pub created_at: String,
}

/// Answer to `GET /v1/keys`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeyList {
    /// The keys, by id.
    pub keys: Vec<KeyRecord>,
}

/// Answer to `GET /v1/images`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageList {
    /// The images, by name.
    pub images: Vec<ImageRecord>,
    /// Give this as `cursor` for the next page; absent on the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// Answer to `GET /v1/layers`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LayerList {
    /// The layers, by digest.
    pub layers: Vec<LayerRecord>,
    /// Give this as `cursor` for the next page; absent on the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// What a layer takes on a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LayerUsage {
    /// The layer.
    pub digest: Digest,
    /// Bytes of metadata and data.
    pub size_bytes: u64,
    /// Bytes it takes on the node's disk.
    pub local_bytes: u64,
    /// Its chunks.
    pub chunks: u64,
    /// Chunks that are on the node.
    pub local_chunks: u64,
    /// Bytes of its data on the node's disk that can be had again: these count for the limit of the cache.
    #[serde(default)]
    pub cached_bytes: u64,
    /// Bytes that its data takes in the shared store; absent for a layer that was never there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_bytes: Option<u64>,
    /// Bytes of these that other layers of the node refer to as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_bytes: Option<u64>,
    /// Whether it is in the shared store; absent where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<bool>,
    /// Whether it is mounted.
    pub mounted: bool,
    /// What was read of it while it was not wholly here, since the server of lazy reads was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads: Option<LayerReads>,
}

/// Reads of a layer that is not wholly on the node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LayerReads {
    /// Bytes that readers asked for. What the host has in memory is not asked for.
    pub read_bytes: u64,
    /// Chunks that readers asked for, of all that the layer has.
    #[serde(default)]
    pub touched_chunks: u64,
    /// Bytes that came from the shared store, as they are stored there.
    pub fetched_bytes: u64,
    /// Reads of what was on the node.
    pub hits: u64,
    /// Reads that had to wait.
    pub misses: u64,
    /// Reads that failed.
    pub errors: u64,
    /// Fetches from the store.
    pub fetches: u64,
    /// What these took together.
    pub fetch_us: u64,
}

/// Answer to `GET /v1/layers:usage`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LayerUsageList {
    /// Layers on the node, by digest.
    pub layers: Vec<LayerUsage>,
    /// Layers that are only in the shared store.
    pub elsewhere: u64,
    /// Bytes of data on the node that can be had again.
    #[serde(default)]
    pub cached_bytes: u64,
    /// The most that these may be before data that no live sandbox has is given up; absent where nothing ever is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_limit_bytes: Option<u64>,
}

/// Body of `POST /v1/layers:gc`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GcSpec {
    /// How long what nothing needs stays on the node and in the shared store, in milliseconds. A day where absent.
    #[serde(default = "a_day")]
    pub grace_ms: u64,
    /// Only tell what would be removed.
    #[serde(default)]
    pub dry_run: bool,
}

fn a_day() -> u64 {
    24 * 3600 * 1000
}

/// What the gateway asks of a node for a collection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GcOnNode {
    /// The caller's settings.
    pub spec: GcSpec,
    /// Layers that the catalogue names, of all projects.
    pub needed: Vec<Digest>,
    /// Unix milliseconds: imports, builds and snapshots that had ended by then are in the catalogue, or never will be. What
    /// the node made or used for one since stays.
    pub settled_ms: u64,
}

/// Answer to `POST /v1/layers:gc`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GcResult {
    /// Layers that were removed, or would be.
    pub layers: Vec<Digest>,
    /// Packs that were removed, or would be.
    pub packs: u64,
    /// Bytes of these packs.
    pub pack_bytes: u64,
    /// Layers and packs that nothing needs, but not for long enough.
    pub waiting: u64,
    /// Bytes of packs that are needed.
    pub kept_bytes: u64,
    /// Uploads to a directory store that were cut off and are removed. None are told in a dry run.
    #[serde(default)]
    pub unfinished: u64,
    /// Layers on the node that nothing needs and that were removed, or would be: what a cut off snapshot or import left.
    #[serde(default)]
    pub local: Vec<Digest>,
    /// Bytes of these layers.
    #[serde(default)]
    pub local_bytes: u64,
    /// Whether nothing was removed.
    pub dry_run: bool,
}

/// Answer to `GET /v1/environments`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EnvironmentList {
    /// The environments, by name.
    pub environments: Vec<EnvironmentRecord>,
    /// Give this as `cursor` for the next page; absent on the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// Answer to `GET /v1/nodes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NodeList {
    /// The nodes, by id; one that does not answer is shown as it last was and takes no sandboxes.
    pub nodes: Vec<NodeStatus>,
}

/// Body of `POST /v1/sandboxes:batch`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BatchSpec {
    /// The sandboxes to create, 1–1,000.
    pub items: Vec<SandboxSpec>,
}

/// Answer to `POST /v1/sandboxes:batch`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BatchResult {
    /// One result for each item, in the items' order.
    pub items: Vec<BatchItem>,
}

/// What became of one item of a batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BatchItem {
    /// It runs.
    Sandbox(Box<SandboxStatus>),
    /// It was not created.
    Problem(Box<Problem>),
}

/// Answer to `GET /version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VersionInfo {
    /// Version of Corral.
    pub version: String,
    /// Version of the API.
    pub api: String,
}

/// Answer to `GET /sessions` of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SessionList {
    /// The sessions.
    pub sessions: Vec<crate::command::SessionStatus>,
}

/// Answer to `GET /commands` of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommandList {
    /// The commands, oldest first.
    pub commands: Vec<crate::command::CommandStatus>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::ErrorKind;

    #[test]
    fn a_batch_item_is_one_of_two_objects() {
        let item = BatchItem::Problem(Box::new(Problem::new(ErrorKind::Overloaded, "full")));
        let text = serde_json::to_value(&item).unwrap();
        assert_eq!(text["problem"]["kind"], "overloaded");
        assert!(serde_json::from_value::<BatchSpec>(serde_json::json!({"item": []})).is_err());
    }
}
