//! Images and layers on one node: import, build, store, mount and delete.
//!
//! A layer is an EROFS image without file data, the data in a file of its own, and a manifest with the digests of both,
//! whose SHA-256 names the layer (`docs/layer-format.md`). An image is a list of layers and the part of its
//! configuration that a sandbox honours. This crate owns the directory that layers lie in, the only path by which
//! bytes from outside become layers, and the mounts through which sandboxes read them:
//!
//! ```text
//! ImageSource ─ source ─▶ tar members ─ extract ─▶ stage ─ pack ─▶ metadata, data ─ publish ─▶ LayerStore ─ mount ─▶ lower
//! ```
//!
//! Consecutive source layers are applied in one staging directory (a *run*) and become one stored layer, so that an
//! image of a hundred layers needs few mounts. What a run deletes from stored layers below it stays as an overlayfs
//! whiteout (char 0:0, `trusted.overlay.opaque`).
//!
//! All calls block and belong on a blocking thread. Nothing here follows a symbolic link out of a staging directory,
//! and nothing of a failed import stays behind.
#![forbid(unsafe_code)]

mod build;
mod cache;
mod chain;
mod config;
mod diff;
mod dircopy;
mod error;
mod export;
mod extract;
mod import;
mod likeness;
mod lower;
mod mount;
mod pack;
mod paths;
mod recent;
mod record;
mod scrub;
mod shared;
mod snapshot;
mod source;
mod sparse;
mod stage;
mod store;
mod stream;
mod tarstream;
mod usage;
mod walk;

pub use build::{BuildOptions, LayerSource};
pub use cache::Cached;
pub use config::{CancelFlag, ImportOptions, LayersConfig, Limits, ProgressFn};
pub use corral_store::StoreConfig;
pub use error::{EntryFault, ImportError, MountError, StoreError};
pub use export::Export;
pub use scrub::{Scrub, ScrubError};
pub use shared::{GcReport, GcRules, Joined, Published, SharedError, SharedLayers};
pub use snapshot::PackedTree;
pub use source::{ImageSource, RegistryAuth};
pub use store::LayerStore;
