//! Images and layers as callers see them.

use crate::digest::Digest;
use crate::ids::SandboxId;
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
    /// What a sandbox wrote.
    Snapshot,
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
    /// What every sandbox starts with, `cmd` as its arguments. Empty: nothing.
    pub entrypoint: Vec<String>,
    /// Arguments of the entry point. Without one they are a default for interactive use, and nothing runs them.
    pub cmd: Vec<String>,
    /// Image labels.
    pub labels: BTreeMap<String, String>,
}

impl ImageConfig {
    /// A path as commands mean it: from the working directory, which is `/` where none is named.
    pub fn absolute(&self, path: &str) -> String {
        let workdir = if self.workdir.is_empty() { "/" } else { &self.workdir };
        match path {
            "" => workdir.to_owned(),
            _ if path.starts_with('/') => path.to_owned(),
            _ => format!("{}/{path}", workdir.trim_end_matches('/')),
        }
    }

    /// The command a sandbox starts with: the entry point and its arguments, or none.
    pub fn startup(&self) -> Option<Vec<String>> {
        (!self.entrypoint.is_empty()).then(|| [self.entrypoint.as_slice(), &self.cmd].concat())
    }

    /// Lays an entry point and arguments over these. As with Docker, an entry point takes the old arguments with it.
    pub fn lay_over(&mut self, entrypoint: Option<&[String]>, cmd: Option<&[String]>) {
        if let Some(entrypoint) = entrypoint {
            self.entrypoint = entrypoint.to_vec();
            self.cmd.clear();
        }
        if let Some(cmd) = cmd {
            self.cmd = cmd.to_vec();
        }
    }
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
    /// Where it comes from, for a snapshot of a sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<Box<SnapshotOrigin>>,
}

impl ImageRecord {
    /// An image of these layers, lowest first, that was made here.
    pub fn new(name: String, config: ImageConfig, layers: Vec<LayerRecord>) -> Self {
        Self {
            name,
            digest: Self::digest_of(&config, &layers),
            source_digest: None,
            platform: "linux/amd64".to_owned(),
            config,
            size_bytes: layers.iter().map(|l| l.size_bytes).sum(),
            layers,
            snapshot: None,
        }
    }

    /// Digest over the canonical JSON of the configuration and the layers' digests: two imports of one image agree.
    pub fn digest_of(config: &ImageConfig, layers: &[LayerRecord]) -> Digest {
        let digests: Vec<Digest> = layers.iter().map(|l| l.digest).collect();
        // serde_json's map is ordered by key and its text of a value is unique.
        Digest::of(serde_json::json!({"config": config, "layers": digests}).to_string().as_bytes())
    }
}

/// Where a snapshot comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotOrigin {
    /// The sandbox.
    pub sandbox_id: SandboxId,
    /// The snapshot before it: the sandbox's own last one, else the one it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// When, RFC 3339.
    pub created_at: String,
    /// What was packed.
    pub report: PackReport,
}

/// What was packed of a sandbox's writable layer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PackReport {
    /// Files, directories, links and whiteouts.
    pub entries: u64,
    /// Whiteouts and opaque directories among them: what the sandbox deleted.
    pub deletions: u64,
    /// Bytes of the layer.
    pub size_bytes: u64,
    /// How long the sandbox stood still.
    pub frozen_us: u64,
    /// How long packing took.
    pub pack_ms: u64,
    /// How long publishing to the shared store took.
    #[serde(default)]
    pub upload_ms: u64,
    /// Paths that the rules left out: the first hundred of them.
    pub scrubbed: Vec<String>,
    /// How many were left out.
    pub scrubbed_count: u64,
}

/// How a path differs between two images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// It is only in the second.
    Added,
    /// It is in both, and not the same: type, owner, mode, time, attributes or content.
    Changed,
    /// It is only in the first.
    Deleted,
}

/// A path that differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiffEntry {
    /// Absolute path.
    pub path: String,
    /// Where the path is not UTF-8: its bytes in Base64. `path` is then only its readable form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
    /// How it differs. What lies in a directory that was added or deleted is listed as well.
    pub change: Change,
}

/// Answer to `GET /v1/images/{name}/diff`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageDiff {
    /// Paths, sorted.
    pub entries: Vec<DiffEntry>,
    /// Whether there were more than the limit.
    pub truncated: bool,
}

/// What the gateway asks of a node for a diff.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiffOnNode {
    /// Layers of the first image, lowest first.
    pub from: Vec<Digest>,
    /// Layers of the second.
    pub to: Vec<Digest>,
    /// Most entries.
    pub limit: u32,
}

/// Body of `POST /v1/sandboxes/{id}/snapshots`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotSpec {
    /// Name of the image that the snapshot becomes; one of this name is replaced.
    pub name: String,
    /// Paths to leave out, with all below them: absolute, `*` and `?` match within a name, `**` any number of names.
    #[serde(default)]
    pub scrub: Vec<String>,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn paths_are_taken_from_the_working_directory() {
        let at = |workdir: &str, path: &str| {
            ImageConfig { workdir: workdir.into(), ..ImageConfig::default() }.absolute(path)
        };
        assert_eq!(
            [at("", ""), at("", "a"), at("/w", ""), at("/w/", "a"), at("/w", "/a")],
            ["/", "/a", "/w", "/w/a", "/a"]
        );
    }

    #[test]
    fn an_entry_point_takes_the_old_arguments_with_it() {
        let cases: [(Option<&str>, Option<&str>, Option<&str>); 6] = [
            (None, None, Some("serve -a b")),
            (Some("other"), None, Some("other")),
            (Some("other"), Some("c"), Some("other c")),
            (None, Some("c"), Some("serve -a c")),
            (None, Some(""), Some("serve -a")),
            (Some(""), Some("c"), None),
        ];
        for (entrypoint, cmd, startup) in cases {
            let mut config = ImageConfig { entrypoint: words("serve -a"), cmd: words("b"), ..ImageConfig::default() };
            config.lay_over(entrypoint.map(words).as_deref(), cmd.map(words).as_deref());
            assert_eq!(config.startup(), startup.map(words), "{entrypoint:?} {cmd:?}");
        }
        assert_eq!(ImageConfig { cmd: words("bash"), ..ImageConfig::default() }.startup(), None);
    }
}
