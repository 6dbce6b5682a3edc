//! What can go wrong: one enum per action, each answering with the kind a caller sees.

use corral_api::digest::Digest;
use corral_api::problem::ErrorKind;
use std::io;
use std::path::{Path, PathBuf};

/// Why one entry of an archive or directory is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EntryFault {
    /// A `..` in its name.
    #[error("its name contains a `..` component")]
    ParentComponent,
    /// A name that begins with `/`.
    #[error("its name is absolute")]
    AbsoluteName,
    /// A NUL byte in its name.
    #[error("its name contains a NUL byte")]
    NulInName,
    /// An empty name.
    #[error("it has no name")]
    EmptyName,
    /// A component beyond 255 bytes.
    #[error("a component of its name is longer than 255 bytes")]
    NameTooLong,
    /// More directories than allowed.
    #[error("its path is deeper than {0} directories")]
    TooDeep(usize),
    /// Path longer than the kernel can open.
    #[error("its path is longer than {0} bytes")]
    PathTooLong(usize),
    /// A hard link whose target is not a path inside the image.
    #[error("it is a hard link to {target:?}, which leads out of the image")]
    LinkOutside {
        /// The target as written.
        target: String,
    },
    /// A hard link to nothing.
    #[error("it is a hard link to {target:?}, which does not exist")]
    LinkMissing {
        /// The target as written.
        target: String,
    },
    /// A hard link to a directory.
    #[error("it is a hard link to {target:?}, which is a directory")]
    LinkToDirectory {
        /// The target as written.
        target: String,
    },
    /// A device node outside `dev/`.
    #[error("it is a device node")]
    Device,
    /// An owner that no sandbox can map.
    #[error("its owner {uid}:{gid} is beyond 65535")]
    OwnerTooLarge {
        /// User id.
        uid: u64,
        /// Group id.
        gid: u64,
    },
    /// A parent that is a file.
    #[error("a parent of its path is not a directory")]
    NotADirectory,
    /// Symbolic links that lead round and round.
    #[error("its path passes through too many symbolic links")]
    SymlinkLoop,
    /// A whiteout that names nothing.
    #[error("it is a malformed whiteout")]
    BadWhiteout,
    /// A type that has no meaning in an image.
    #[error("its type {0:?} is not supported")]
    UnsupportedType(char),
    /// Sparse map that is out of order or beyond the file.
    #[error("its sparse map is malformed")]
    BadSparseMap,
    /// A header that cannot be read.
    #[error("its header is malformed: {0}")]
    BadHeader(&'static str),
    /// An extended attribute that the file system refuses.
    #[error("its extended attribute {name:?} was refused")]
    Xattr {
        /// Name of the attribute.
        name: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The root of the image as something other than a directory.
    #[error("it would replace the root directory")]
    ReplacesRoot,
}

/// An image import or a layer build that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// An entry that is refused.
    #[error("{source_name}: entry {entry:?} is refused: {fault}")]
    Entry {
        /// The source layer, archive or directory.
        source_name: String,
        /// Name of the entry as written.
        entry: String,
        /// Why.
        fault: EntryFault,
    },
    /// More unpacked bytes than allowed.
    #[error("{source_name}: unpacks to more than {limit} bytes")]
    TooLarge {
        /// What was being unpacked.
        source_name: String,
        /// The bound.
        limit: u64,
    },
    /// More entries than allowed.
    #[error("{source_name}: holds more than {limit} entries")]
    TooManyEntries {
        /// What was being unpacked.
        source_name: String,
        /// The bound.
        limit: u64,
    },
    /// A stream that ends too early.
    #[error("{source_name}: the stream is truncated")]
    Truncated {
        /// What was being read.
        source_name: String,
    },
    /// A stream that does not decode.
    #[error("{source_name}: the stream is corrupt: {reason}")]
    Corrupt {
        /// What was being read.
        source_name: String,
        /// What the decoder said.
        reason: String,
    },
    /// Content does not have the digest it was named by.
    #[error("{source_name}: expected digest {expected}, found {actual}")]
    DigestMismatch {
        /// What was being read.
        source_name: String,
        /// As named.
        expected: Digest,
        /// As found.
        actual: Digest,
    },
    /// Content does not have the size it was described with.
    #[error("{source_name}: expected {expected} bytes, found {actual}")]
    SizeMismatch {
        /// What was being read.
        source_name: String,
        /// As described.
        expected: u64,
        /// As found (or where reading stopped).
        actual: u64,
    },
    /// A manifest, index or configuration that cannot be accepted.
    #[error("{source_name}: {reason}")]
    Manifest {
        /// Which document.
        source_name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A media type that is not an image's.
    #[error("{source_name}: media type {media_type:?} is not supported")]
    MediaType {
        /// Which descriptor.
        source_name: String,
        /// The type.
        media_type: String,
    },
    /// An image without layers.
    #[error("{source_name}: the image has no layers")]
    NoLayers {
        /// Which image.
        source_name: String,
    },
    /// No manifest for the platform.
    #[error("{source_name}: no image for platform {platform}")]
    NoPlatform {
        /// Which index.
        source_name: String,
        /// What was asked for.
        platform: String,
    },
    /// The source is of another form.
    #[error("{source_name}: not {wanted}: {found}")]
    UnknownFormat {
        /// What was being read.
        source_name: String,
        /// What it should be.
        wanted: &'static str,
        /// What it looks like.
        found: String,
    },
    /// A parameter that cannot be.
    #[error("{0}")]
    InvalidRequest(String),
    /// The registry has no such image.
    #[error("{reference}: no such image in the registry")]
    RegistryNotFound {
        /// As asked for.
        reference: String,
    },
    /// The registry wants other credentials.
    #[error("{reference}: the registry refused the credentials")]
    RegistryUnauthorized {
        /// As asked for.
        reference: String,
    },
    /// The registry could not be reached or answered nonsense.
    #[error("{reference}: the registry failed")]
    Registry {
        /// As asked for.
        reference: String,
        /// What the client said.
        #[source]
        source: Box<oci_client::errors::OciDistributionError>,
    },
    /// It was cancelled.
    #[error("the import was cancelled")]
    Cancelled,
    /// The tree has something that no layer can hold.
    #[error("{path} cannot be stored as a layer", path = .path.display())]
    Unstorable {
        /// The tree.
        path: PathBuf,
        /// What it has.
        #[source]
        source: corral_format::erofs::TreeError,
    },
    /// The store refused.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A lower layer could not be looked into.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The host's file system failed.
    #[error("cannot {op} {path}", path = .path.display())]
    Io {
        /// What was tried.
        op: &'static str,
        /// On what.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

impl ImportError {
    pub(crate) fn io(op: &'static str, path: impl AsRef<Path>, source: impl Into<io::Error>) -> Self {
        Self::Io { op, path: path.as_ref().to_owned(), source: source.into() }
    }

    /// The caller's source could not be opened: mostly the caller's mistake, else the host's.
    pub(crate) fn source(path: impl AsRef<Path>, e: impl Into<io::Error>) -> Self {
        let e = e.into();
        match e.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => {
                Self::InvalidRequest(format!("{}: {}", path.as_ref().display(), e.kind()))
            }
            _ => Self::io("open", path, e),
        }
    }

    /// What kind of error a caller sees, which tells also whether the same call may succeed later.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Entry { .. }
            | Self::Truncated { .. }
            | Self::Corrupt { .. }
            | Self::SizeMismatch { .. }
            | Self::Manifest { .. }
            | Self::MediaType { .. }
            | Self::NoLayers { .. }
            | Self::NoPlatform { .. }
            | Self::UnknownFormat { .. } => ErrorKind::InvalidImage,
            Self::TooLarge { .. } | Self::TooManyEntries { .. } => ErrorKind::TooLarge,
            Self::DigestMismatch { .. } => ErrorKind::DigestMismatch,
            Self::InvalidRequest(_) | Self::RegistryUnauthorized { .. } => ErrorKind::InvalidRequest,
            Self::RegistryNotFound { .. } => ErrorKind::NotFound,
            Self::Registry { .. } => ErrorKind::UpstreamFailed,
            Self::Cancelled => ErrorKind::Conflict,
            Self::Unstorable { .. } => ErrorKind::InvalidImage,
            Self::Store(e) => e.kind(),
            Self::Mount(e) => e.kind(),
            Self::Io { source, .. } => io_kind(source),
        }
    }
}

/// The layer store could not do it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// No layer of this digest.
    #[error("no layer {0}")]
    NotFound(Digest),
    /// A sandbox, an environment or an image needs it.
    #[error("layer {0} is in use")]
    InUse(Digest),
    /// It is mounted.
    #[error("layer {0} is mounted")]
    Mounted(Digest),
    /// The file's bytes are not those it is named by.
    #[error("layer {expected} is corrupt: its file has digest {actual}")]
    DigestMismatch {
        /// Name of the layer.
        expected: Digest,
        /// What its bytes hash to.
        actual: Digest,
    },
    /// The file is not what its record says, found without reading all of it.
    #[error("layer {digest} is damaged: {reason}")]
    Damaged {
        /// The layer.
        digest: Digest,
        /// What differs.
        reason: String,
    },
    /// Its data is elsewhere, and nothing reads it from there.
    #[error("layer {0} is not wholly on this node, and nothing fetches what is missing")]
    NotServed(Digest),
    /// Another process holds the store.
    #[error("{path} is held by another process", path = .0.display())]
    Locked(PathBuf),
    /// A record that cannot be read.
    #[error("record {path} is malformed: {reason}", path = .path.display())]
    Record {
        /// The record.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The host's file system failed.
    #[error("cannot {op} {path}", path = .path.display())]
    Io {
        /// What was tried.
        op: &'static str,
        /// On what.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

impl StoreError {
    pub(crate) fn io(op: &'static str, path: impl AsRef<Path>, source: impl Into<io::Error>) -> Self {
        Self::Io { op, path: path.as_ref().to_owned(), source: source.into() }
    }

    /// What kind of error a caller sees, which tells also whether the same call may succeed later.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotFound(_) => ErrorKind::NotFound,
            Self::InUse(_) | Self::Mounted(_) => ErrorKind::Conflict,
            Self::DigestMismatch { .. } | Self::Damaged { .. } => ErrorKind::DigestMismatch,
            Self::Locked(_) | Self::NotServed(_) => ErrorKind::Unavailable,
            Self::Record { .. } => ErrorKind::StorageError,
            Self::Io { source, .. } => io_kind(source),
        }
    }
}

/// A layer could not be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The store has no sound layer of this digest.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The kernel cannot mount EROFS from a file.
    #[error("this kernel cannot mount {path} as file-backed EROFS", path = .path.display())]
    Unsupported {
        /// The layer's file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A mount call failed.
    #[error("cannot {op} {path}", path = .path.display())]
    Syscall {
        /// What was tried.
        op: &'static str,
        /// On what.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

impl MountError {
    pub(crate) fn syscall(op: &'static str, path: impl AsRef<Path>, source: impl Into<io::Error>) -> Self {
        Self::Syscall { op, path: path.as_ref().to_owned(), source: source.into() }
    }

    /// What kind of error a caller sees, which tells also whether the same call may succeed later.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Store(e) => e.kind(),
            Self::Unsupported { .. } => ErrorKind::Unsupported,
            Self::Syscall { source, .. } => io_kind(source),
        }
    }
}

pub(crate) fn io_kind(e: &io::Error) -> ErrorKind {
    match e.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::InsufficientStorage,
        _ => ErrorKind::StorageError,
    }
}
