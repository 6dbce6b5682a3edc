//! What can go wrong in the catalogue.

use corral_api::problem::ErrorKind;
use std::path::PathBuf;

/// Why the catalogue refused or failed.
#[derive(Debug, thiserror::Error)]
pub enum CatalogueError {
    /// The database file cannot be opened or set up.
    #[error("cannot open the catalogue {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
    /// Another version of Corral wrote the file.
    #[error("the catalogue {} has schema version {found}, this program knows {known}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Version in the file.
        found: i64,
        /// Version this program writes.
        known: i64,
    },
    /// A statement failed.
    #[error("catalogue: {op} failed")]
    Sql {
        /// What was done.
        op: &'static str,
        /// Why.
        source: rusqlite::Error,
    },
    /// A stored record cannot be read.
    #[error("catalogue: the record of {what} {name:?} is damaged")]
    Damaged {
        /// Sort of record.
        what: &'static str,
        /// Its name.
        name: String,
        /// Why.
        source: serde_json::Error,
    },
    /// No record of this name.
    #[error("there is no {what} {name:?}")]
    NotFound {
        /// Sort of record.
        what: &'static str,
        /// The name asked for.
        name: String,
    },
    /// Something else still needs the record.
    #[error("{what} {name:?} is in use by {by}")]
    InUse {
        /// Sort of record.
        what: &'static str,
        /// Its name.
        name: String,
        /// What needs it.
        by: String,
    },
    /// The last key cannot be deleted: nobody could make another one.
    #[error("{0:?} is the last key: create another one before deleting it")]
    LastKey(String),
    /// A name that is not allowed.
    #[error(
        "{what} name {name:?}: 1–255 printable ASCII characters without quotes, \\, ?, # and %, not a digest, no empty part, . or .. between slashes, not beginning with - or ."
    )]
    BadName {
        /// Sort of record.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A specification that cannot be honoured.
    #[error("{0}")]
    BadSpec(String),
}

impl CatalogueError {
    /// The kind callers see.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Open { .. } | Self::Version { .. } | Self::Sql { .. } | Self::Damaged { .. } => ErrorKind::Internal,
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::InUse { .. } | Self::LastKey(_) => ErrorKind::Conflict,
            Self::BadName { .. } | Self::BadSpec(_) => ErrorKind::InvalidRequest,
        }
    }
}
