//! What a sandbox is made of: base + workspaces + toolkits + writable layer, and its limits.

use crate::command::{check_arguments, check_argv, check_env};
use crate::digest::Digest;
use crate::image::ImageConfig;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// An environment: a base image and layers on top of it, lowest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EnvironmentSpec {
    /// Name or digest of an imported image.
    pub base: String,
    /// Digests of workspace layers, lowest first.
    #[serde(default)]
    pub workspaces: Vec<Digest>,
    /// Digests of toolkit layers, lowest first, above the workspaces.
    #[serde(default)]
    pub toolkits: Vec<Digest>,
    /// Variables set in every command, over those of the image.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Working directory of commands instead of the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// User of commands instead of the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// What sandboxes start with instead of the image's entry point and its arguments. Empty: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrypoint: Option<Vec<String>>,
    /// Arguments of the entry point instead of the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cmd: Option<Vec<String>>,
}

impl EnvironmentSpec {
    /// Refuses settings that cannot be honoured.
    ///
    /// # Errors
    /// A text that names the field and what it may be.
    pub fn check(&self) -> Result<(), String> {
        check_env(&self.env)?;
        if let Some(workdir) = self.workdir.as_deref().filter(|w| !w.starts_with('/')) {
            return Err(format!("workdir {workdir:?} is not an absolute path"));
        }
        check_argv("entrypoint", self.entrypoint.as_deref().unwrap_or_default())?;
        check_arguments("cmd", self.cmd.as_deref().unwrap_or_default())
    }
}

/// A named environment in the catalogue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EnvironmentRecord {
    /// Its name.
    pub name: String,
    /// What it is made of.
    pub spec: EnvironmentSpec,
    /// Creation time, RFC 3339.
    pub created_at: String,
}

/// An environment with every name resolved: what the node is given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolvedEnvironment {
    /// What the caller named, for lists.
    pub name: String,
    /// Layers from the bottom up.
    pub layers: Vec<Digest>,
    /// Configuration of commands: image, overlaid with the specification.
    pub config: ImageConfig,
}

/// Limits of a sandbox. They hold for everything in it together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Memory, page cache included.
    pub memory_mib: u32,
    /// CPU quota in cores; fractions are allowed.
    pub cpus: f64,
    /// Share of the CPU under contention, 1–10,000.
    pub cpu_weight: u32,
    /// Processes and threads.
    pub pids: u32,
    /// Open files of each process.
    pub open_files: u32,
    /// Size of the writable layer.
    pub disk_mib: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { memory_mib: 512, cpus: 1.0, cpu_weight: 100, pids: 512, open_files: 4096, disk_mib: 1024 }
    }
}

impl Limits {
    /// Refuses limits that cannot be set.
    ///
    /// # Errors
    /// A text that names the field and its range.
    pub fn check(&self) -> Result<(), String> {
        let within = |name: &str, value: f64, low: f64, high: f64| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(format!("limits.{name} is {value}: it must lie between {low} and {high}"))
            }
        };
        within("memory_mib", self.memory_mib.into(), 4.0, 16_777_216.0)?;
        within("cpus", self.cpus, 0.01, 4096.0)?;
        within("cpu_weight", self.cpu_weight.into(), 1.0, 10_000.0)?;
        within("pids", self.pids.into(), 2.0, 1_000_000.0)?;
        within("open_files", self.open_files.into(), 16.0, 1_048_576.0)?;
        within("disk_mib", self.disk_mib.into(), 1.0, 16_777_216.0)
    }
}
