//! Query parameters of the routes. Unknown names are refused, so that a mistyped option is never silently ignored.

use crate::command::StreamName;
use crate::image::LayerKind;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// How an uploaded image is laid out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum UploadKind {
    /// Told from its content.
    #[default]
    Auto,
    /// `docker save` archive or OCI layout.
    Archive,
    /// A root file system.
    Rootfs,
}

/// `PUT /v1/images/{name}`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct ImageUpload {
    /// How the tar stream is laid out.
    #[param(inline)]
    pub kind: UploadKind,
    /// `os/architecture[/variant]`; `linux/amd64` where absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub platform: Option<String>,
}

/// `GET /v1/images`, `GET /v1/layers` and `GET /v1/environments`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct PageQuery {
    /// The most in one page, 1 to 10,000; 1,000 where absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// `next_cursor` of the page before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

/// `GET /v1/images/{name}/diff`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DiffQuery {
    /// The image to compare with, by name or digest.
    pub from: String,
    /// Most entries, 1 to 100,000; 10,000 where absent.
    #[serde(default)]
    pub limit: Option<u32>,
}

/// `PUT /v1/layers`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct LayerUpload {
    /// `workspace` or `toolkit`.
    pub kind: LayerKind,
    /// Absolute path of the layer's content inside the sandbox.
    pub at: String,
}

/// `GET /v1/events`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct EventQuery {
    /// Events with a larger sequence number only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
    /// Events of this sandbox only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// The most in one page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
}

/// `POST …/exec`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct ExecQuery {
    /// Answer with NDJSON events as they come.
    pub stream: bool,
}

/// `GET …/commands/{command_id}`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct WaitQuery {
    /// Wait up to this long for its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
}

/// `GET …/commands/{command_id}/output`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct OutputQuery {
    /// `stdout` where absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<StreamName>,
    /// First byte wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// The most bytes wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Go on until the command ends.
    pub follow: bool,
}

/// `POST …/commands/{command_id}/stdin`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct StdinQuery {
    /// Close standard input after these bytes.
    pub close: bool,
}

/// `GET …/files`, `GET …/files/stat`, `GET …/files/tar`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FileQuery {
    /// Path inside the sandbox.
    pub path: String,
    /// Act as this user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// `PUT …/files/tar`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct TarWrite {
    /// Directory inside the sandbox.
    pub path: String,
    /// Act as this user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Give entries the owners that the stream names by number, 0–65,535; root alone may. They are the user's where
    /// absent.
    #[serde(default)]
    pub owners: bool,
}

/// `PUT …/files`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FileWrite {
    /// Path inside the sandbox.
    pub path: String,
    /// Act as this user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Permission bits, such as 493 for 0755; 0644 where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Make missing parents.
    #[serde(default)]
    pub parents: bool,
}

/// `DELETE …/files`, `GET …/files/watch`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FileTreeQuery {
    /// Path inside the sandbox.
    pub path: String,
    /// Act as this user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// With everything below it.
    #[serde(default)]
    pub recursive: bool,
}

/// `GET …/files/list`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FileListQuery {
    /// Directory inside the sandbox.
    pub path: String,
    /// Act as this user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Levels below the directory; 1 where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<u32>,
    /// The most entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
}
