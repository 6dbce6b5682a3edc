//! The catalogue: projects, API keys, images, layers and environments in one SQLite file.
//!
//! Every record belongs to a project. Calls block for the length of a database access, so that async code runs them on
//! the blocking pool; what each request needs (its key and its environment) is answered from bounded memory.

mod build_cache;
mod cached;
mod compose;
mod environments;
mod error;
mod images;
mod keys;
mod layers;
mod page;
mod resolve;

pub use build_cache::MAX_ENTRIES as MAX_BUILT_STEPS;
pub use compose::MAX_LAYERS;
pub use error::CatalogueError;
pub use keys::VerifiedKey;
pub use page::{Listed, Page};

use cached::Cached;
use corral_api::environment::ResolvedEnvironment;
use rusqlite::Connection;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const SCHEMA: &str = include_str!("schema.sql");
const BUILD_CACHE: &str = include_str!("build_cache.sql");
/// So that a record that goes finds what goes with it, among a hundred thousand.
const INDEXES: &str = "
    CREATE INDEX IF NOT EXISTS image_layers_by_image ON image_layers (project_id, image);
    CREATE INDEX IF NOT EXISTS environment_layers_by_environment ON environment_layers (project_id, environment);";
const SCHEMA_VERSION: i64 = 1;
/// Keys and environments kept in memory.
const CACHED: usize = 4096;
const NOW: &str = "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')";

/// Names, keys and records. One process owns the file.
#[derive(Debug)]
pub struct Catalogue {
    connection: Mutex<Connection>,
    verified: Cached<[u8; 32], Arc<VerifiedKey>>,
    resolved: Cached<String, Arc<ResolvedEnvironment>>,
}

impl Catalogue {
    /// Opens the catalogue, making the file and its tables where they are missing.
    ///
    /// # Errors
    /// The file cannot be opened, or a later version of Corral wrote it.
    pub fn open(path: &Path) -> Result<Self, CatalogueError> {
        let opened = Connection::open(path);
        Self::with(opened.map_err(|source| CatalogueError::Open { path: path.into(), source })?, path)
    }

    /// A catalogue that is gone with the process.
    ///
    /// # Errors
    /// SQLite refuses.
    pub fn in_memory() -> Result<Self, CatalogueError> {
        let path = Path::new(":memory:");
        let opened = Connection::open_in_memory();
        Self::with(opened.map_err(|source| CatalogueError::Open { path: path.into(), source })?, path)
    }

    fn with(mut connection: Connection, path: &Path) -> Result<Self, CatalogueError> {
        let open = |source| CatalogueError::Open { path: path.into(), source };
        connection.busy_timeout(Duration::from_secs(5)).map_err(open)?;
        // FULL: a key or image that was confirmed is still there after a power failure. Writes are rare.
        connection
            .execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;")
            .map_err(open)?;
        let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(open)?;
        match version {
            0 => {
                let tx = connection.transaction().map_err(open)?;
                tx.execute_batch(SCHEMA).map_err(open)?;
                tx.pragma_update(None, "user_version", SCHEMA_VERSION).map_err(open)?;
                tx.commit().map_err(open)?;
            }
            SCHEMA_VERSION => {}
            other => {
                return Err(CatalogueError::Version { path: path.into(), found: other, known: SCHEMA_VERSION });
            }
        }
        connection.execute_batch(BUILD_CACHE).map_err(open)?;
        connection.execute_batch(INDEXES).map_err(open)?;
        Ok(Self { connection: Mutex::new(connection), verified: Cached::new(CACHED), resolved: Cached::new(CACHED) })
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // A panic inside a transaction rolls it back, so that the connection stays usable.
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a write in one transaction and forgets what was resolved before it.
    fn write<T>(
        &self,
        op: &'static str,
        work: impl FnOnce(&rusqlite::Transaction<'_>) -> Result<T, CatalogueError>,
    ) -> Result<T, CatalogueError> {
        let value = self.write_unseen(op, work)?;
        self.resolved.clear();
        Ok(value)
    }

    /// Runs a write that no environment depends on in one transaction.
    fn write_unseen<T>(
        &self,
        op: &'static str,
        work: impl FnOnce(&rusqlite::Transaction<'_>) -> Result<T, CatalogueError>,
    ) -> Result<T, CatalogueError> {
        let sql = |source| CatalogueError::Sql { op, source };
        let mut connection = self.connection();
        let tx = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).map_err(sql)?;
        let value = work(&tx)?;
        tx.commit().map_err(sql)?;
        Ok(value)
    }
}

/// Refuses names that could not be told from a digest, or not be typed.
///
/// # Errors
/// [`CatalogueError::BadName`].
pub fn check_name(what: &'static str, name: &str) -> Result<(), CatalogueError> {
    let fine = !name.starts_with(['-', '/', '.'])
        && !name.split('/').any(|part| matches!(part, "" | "." | ".."))
        && name.len() <= 255
        && !name.starts_with("sha256:")
        && name.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '"' | '\'' | '\\' | '?' | '#' | '%'));
    if fine { Ok(()) } else { Err(CatalogueError::BadName { what, name: name.chars().take(80).collect() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for fine in ["a", "a.b", "host:5000/team/image:v1", "demo/base", "_x", "a..b/c-d"] {
            assert!(check_name("image", fine).is_ok(), "{fine}");
        }
        for bad in ["", "-x", ".x", "/x", "x/", "a//b", "../x", "a/../b", "a/./b", "a b", "a?b", "ü", "sha256:1"] {
            assert!(check_name("image", bad).is_err(), "{bad}");
        }
    }
}
