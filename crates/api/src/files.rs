//! Files inside a sandbox.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a path names. Symbolic links are not followed for this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileType {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// Named pipe.
    Fifo,
    /// Socket.
    Socket,
    /// Character or block device.
    Device,
}

/// A file's attributes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileStatus {
    /// Path as asked for; in lists, relative to the listed directory.
    pub path: String,
    /// Sort.
    pub file_type: FileType,
    /// Size.
    pub size_bytes: u64,
    /// Permission bits, such as 493 for 0755.
    pub mode: u32,
    /// Owner inside the sandbox.
    pub uid: u32,
    /// Group inside the sandbox.
    pub gid: u32,
    /// Last change of the content, milliseconds since 1970.
    pub mtime_ms: i64,
    /// Target of a symbolic link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_target: Option<String>,
    /// Where the target is not UTF-8: its bytes in Base64. `link_target` is then only its readable form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_target_base64: Option<String>,
    /// In lists, where the path is not UTF-8: its bytes in Base64. `path` is then only its readable form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
}

/// A page of a directory, sorted by path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DirectoryPage {
    /// Entries.
    pub entries: Vec<FileStatus>,
    /// Whether there were more than the limit.
    pub truncated: bool,
}

/// Body of `POST …/files/mkdir`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MkdirRequest {
    /// Directory to make.
    pub path: String,
    /// Make missing parents, and accept an existing directory.
    #[serde(default)]
    pub parents: bool,
    /// Permission bits; 0755 where absent.
    #[serde(default)]
    pub mode: Option<u32>,
    /// Act as this user.
    #[serde(default)]
    pub user: Option<String>,
}

/// Body of `POST …/files/move`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// What to move.
    pub from: String,
    /// Where to.
    pub to: String,
    /// Replace what is there.
    #[serde(default)]
    pub overwrite: bool,
    /// Act as this user.
    #[serde(default)]
    pub user: Option<String>,
}

/// A change seen by a watch (`text/event-stream`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum WatchEvent {
    /// The watch is in place: later changes are seen.
    Ready,
    /// Something appeared.
    Created {
        /// Relative to the watched directory.
        path: String,
    },
    /// Content changed.
    Modified {
        /// Relative to the watched directory.
        path: String,
    },
    /// Something is gone.
    Removed {
        /// Relative to the watched directory.
        path: String,
    },
    /// Attributes changed.
    Attributes {
        /// Relative to the watched directory.
        path: String,
    },
    /// Changes came faster than they could be told: list anew.
    Overflow,
}
