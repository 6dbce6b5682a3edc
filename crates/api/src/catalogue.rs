//! API keys, and the bodies that list the catalogue's records.

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
}

/// Answer to `GET /v1/layers`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LayerList {
    /// The layers, by digest.
    pub layers: Vec<LayerRecord>,
}

/// Answer to `GET /v1/environments`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EnvironmentList {
    /// The environments, by name.
    pub environments: Vec<EnvironmentRecord>,
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
