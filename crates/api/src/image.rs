//! Images and layers as callers see them.

use crate::digest::Digest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// What a layer is for; part of its record, not of its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LayerKind {
    /// Part of an imported image.
    Base,
    /// The task's files.
    Workspace,
    /// Tools added beside a task.
    Toolkit,
}

/// A stored layer: an immutable EROFS file named by the digest of its bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LayerRecord {
    /// Digest of the EROFS file.
    pub digest: Digest,
    /// What the layer is for.
    pub kind: LayerKind,
    /// Directory inside the sandbox that the layer's content was placed at (`/` for a base).
    pub at: String,
    /// Size of the stored file.
    pub size_bytes: u64,
    /// Files, directories, links and whiteouts in it.
    pub entries: u64,
}

/// The part of an OCI image configuration that a sandbox honours.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ImageConfig {
    /// Environment variables.
    pub env: BTreeMap<String, String>,
    /// Working directory; `/` where the image names none.
    pub workdir: String,
    /// `user`, `uid`, `user:group` or `uid:gid`; empty means root.
    pub user: String,
    /// Entry point.
    pub entrypoint: Vec<String>,
    /// Default arguments.
    pub cmd: Vec<String>,
    /// Image labels.
    pub labels: BTreeMap<String, String>,
}

/// An imported image: its name, configuration and layers from the bottom up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImageRecord {
    /// Name the image was imported under.
    pub name: String,
    /// Digest over the configuration and the layers' digests.
    pub digest: Digest,
    /// Digest of the manifest in its source, where the source had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_digest: Option<String>,
    /// `os/architecture[/variant]`.
    pub platform: String,
    /// Configuration honoured by sandboxes.
    pub config: ImageConfig,
    /// Layers, lowest first.
    pub layers: Vec<LayerRecord>,
    /// Sum of the layers' stored sizes.
    pub size_bytes: u64,
}

/// One line of an import's progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ImportProgress {
    /// The manifest is read: how much there is to do.
    Planned {
        /// Source layers.
        layers: u32,
        /// Compressed bytes to read, 0 where unknown.
        bytes: u64,
    },
    /// Bytes of a source layer were read.
    Fetched {
        /// Index of the source layer.
        layer: u32,
        /// Compressed bytes read so far in this layer.
        bytes: u64,
    },
    /// A stored layer is being built.
    Building {
        /// Index of the stored layer.
        layer: u32,
    },
    /// A stored layer is published.
    Stored {
        /// Digest of the layer.
        digest: Digest,
        /// Size of the stored file.
        bytes: u64,
    },
    /// All done; the last line of a successful image import.
    Imported {
        /// The image.
        image: ImageRecord,
    },
    /// All done; the last line of a successful layer build.
    Built {
        /// The layer.
        layer: LayerRecord,
    },
    /// The import failed; the last line.
    Failed {
        /// What went wrong.
        problem: crate::problem::Problem,
    },
}
