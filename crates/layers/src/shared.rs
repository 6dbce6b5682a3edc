//! Layers in a store that many nodes share: published there, found there, and removed when nothing needs them.
//!
//! ```text
//! publish: packs of new chunks ─▶ metadata ─▶ places ─▶ manifest     a layer without its manifest does not exist
//! adopt:   manifest, metadata, places ─▶ a local layer whose data is still in the store
//! pull:    the same, and all data
//! ```
//! Keys and bytes are those of `docs/layer-format.md`. Nothing that comes from the store is believed: the manifest is
//! what the digest names, and everything else is what the manifest names.

mod adopt;
mod gc;
mod index;
mod keys;
mod publish;
mod pull;
mod users;

use crate::error::{StoreError, io_kind};
use crate::recent::Recent;
use crate::store::LayerStore;
use corral_api::digest::Digest;
use corral_api::problem::ErrorKind;
use corral_format::FormatError;
use corral_format::manifest::Hash;
use corral_store::{Key, Store};
use index::ChunkIndex;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

pub use gc::{GcReport, GcRules};
pub use publish::Published;
pub use users::Joined;

/// Longest manifest, metadata or table that is read from a store: a layer of millions of files.
const MOST_BYTES: u64 = 1 << 30;

/// Something with the shared store failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SharedError {
    /// No layer of this digest is published.
    #[error("layer {0} is not in the shared store")]
    NotFound(Digest),
    /// Nothing is published at all.
    #[error("{store} holds no layers: its mount may be missing")]
    Empty {
        /// Which store.
        store: String,
    },
    /// The store failed.
    #[error("the shared store failed")]
    Remote(#[source] corral_store::StoreError),
    /// What the store holds is not what it is named by.
    #[error("layer {digest} is damaged in the shared store: {reason}")]
    Damaged {
        /// The layer.
        digest: Digest,
        /// What is wrong.
        reason: String,
    },
    /// The layer is not wholly here, so it cannot be published from here.
    #[error("layer {0} is not complete on this node")]
    Partial(Digest),
    /// What it refers to was removed meanwhile. Again, it is written anew.
    #[error("the publication of layer {0} met a gc: try again")]
    Raced(Digest),
    /// Other catalogues name layers of the store, and what they need is not known here.
    #[error(
        "other nodes with catalogues of their own use the shared store, and their layers would be removed ({users}): \
         give each a store of its own; the mark of one that is gone for good is the object users/ID, to be removed"
    )]
    Others {
        /// Their ids.
        users: String,
    },
    /// It is not the store that this node joined.
    #[error("{store} has no mark of this node, which used it before: its mount may be missing, or it was replaced")]
    Astray {
        /// Which store.
        store: String,
    },
    /// Its layers refer to packs, and there is none.
    #[error("{store} holds layers and none of the packs they refer to: a part of it may not be mounted")]
    Hollow {
        /// Which store.
        store: String,
    },
    /// The local store failed.
    #[error(transparent)]
    Local(#[from] StoreError),
    /// The index of chunks failed.
    #[error("the index of chunks {path} failed", path = .path.display())]
    Index {
        /// Its file.
        path: PathBuf,
        /// Why.
        #[source]
        source: rusqlite::Error,
    },
    /// The host failed.
    #[error("cannot {op} {path}", path = .path.display())]
    Io {
        /// What was tried.
        op: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl SharedError {
    fn io(op: &'static str, path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        Self::Io { op, path: path.into(), source: source.into() }
    }

    fn format(digest: &Digest, e: &FormatError) -> Self {
        Self::Damaged { digest: *digest, reason: e.to_string() }
    }

    /// What kind of error a caller sees.
    pub fn kind(&self) -> ErrorKind {
        use corral_store::ErrorKind as Remote;
        match self {
            Self::NotFound(_) => ErrorKind::NotFound,
            Self::Remote(e) => match e.kind() {
                Remote::Full => ErrorKind::InsufficientStorage,
                Remote::Timeout | Remote::Unavailable => ErrorKind::Unavailable,
                Remote::Unsupported => ErrorKind::Unsupported,
                _ => ErrorKind::UpstreamFailed,
            },
            Self::Damaged { .. } => ErrorKind::DigestMismatch,
            Self::Partial(_) | Self::Others { .. } => ErrorKind::Conflict,
            Self::Raced(_) | Self::Empty { .. } | Self::Astray { .. } | Self::Hollow { .. } => ErrorKind::Unavailable,
            Self::Local(e) => e.kind(),
            Self::Index { .. } => ErrorKind::StorageError,
            Self::Io { source, .. } => io_kind(source),
        }
    }
}

/// The layers of a shared store, as one node sees them. Clones share everything.
#[derive(Clone)]
pub struct SharedLayers {
    store: Arc<dyn Store>,
    local: LayerStore,
    index: Arc<ChunkIndex>,
    beside: Arc<Beside>,
    /// That of this user, once the store was joined.
    mark: Arc<OnceLock<Key>>,
}

/// What publications and a gc beside them must know of each other, in this process: it alone collects
/// ([`SharedLayers::ensure_alone`]).
#[derive(Debug, Default)]
struct Beside {
    /// Packs that were written or referred to.
    packs: Recent<Hash>,
    /// Read while something is noted and looked for in the store, written while something is removed there that was not
    /// noted.
    gate: tokio::sync::RwLock<()>,
    /// One gc at a time.
    collecting: tokio::sync::Mutex<()>,
}

impl std::fmt::Debug for SharedLayers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedLayers").field("store", &self.store.describe()).finish_non_exhaustive()
    }
}

impl SharedLayers {
    /// Joins a local store to a shared one. Blocks for a moment.
    ///
    /// # Errors
    /// The index of chunks cannot be opened.
    pub fn open(local: LayerStore, store: Arc<dyn Store>) -> Result<Self, SharedError> {
        let index = ChunkIndex::open(&local.root().join("chunks.sqlite"))?;
        Ok(Self { store, local, index: Arc::new(index), beside: Arc::default(), mark: Arc::default() })
    }

    /// The shared store.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Whether a layer is published.
    ///
    /// # Errors
    /// The store fails.
    pub async fn is_published(&self, digest: &Digest) -> Result<bool, SharedError> {
        let found = self.store.head(&keys::manifest(digest)?).await.map_err(SharedError::Remote)?;
        Ok(found.is_some())
    }

    /// Runs what blocks on a thread that may.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, SharedError> + Send + 'static,
    ) -> Result<T, SharedError> {
        let this = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&this)).await;
        done.unwrap_or_else(|e| Err(SharedError::io("work on", "a layer", io::Error::other(e))))
    }
}
