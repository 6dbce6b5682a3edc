//! Which chunks the shared store holds, and where: a cache in SQLite, made of the tables of places of all layers.
//!
//! What it says is used to leave chunks out of new packs, so it must not be wrong: a pack that is gone makes a layer
//! unreadable. Packs are removed by gc only, which a publisher meets by looking whether they are there.

use super::SharedError;
use corral_api::digest::Digest;
use corral_format::manifest::{Hash, Manifest};
use corral_format::places::Places;
use rusqlite::{Connection, OptionalExtension, params};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS packs (id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE) STRICT;
CREATE TABLE IF NOT EXISTS chunks (
    hash BLOB PRIMARY KEY, pack INTEGER NOT NULL, offset INTEGER NOT NULL, stored INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS chunks_pack ON chunks (pack);
CREATE TABLE IF NOT EXISTS layers (digest BLOB PRIMARY KEY) STRICT, WITHOUT ROWID;
";

/// Where a chunk is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) pack: Hash,
    pub(super) offset: u64,
    pub(super) stored: u32,
}

/// The index.
pub(super) struct ChunkIndex {
    path: PathBuf,
    connection: Mutex<Connection>,
}

impl ChunkIndex {
    /// Opens or makes the index. It is a cache: one that cannot be read is made anew.
    pub(super) fn open(path: &Path) -> Result<Self, SharedError> {
        let connection = connect(path).or_else(|first| {
            tracing::warn!(error = %first, "the index of chunks is made anew");
            std::fs::remove_file(path).map_err(|_| first)?;
            connect(path)
        });
        let failed = |source| SharedError::Index { path: path.to_owned(), source };
        Ok(Self { path: path.to_owned(), connection: Mutex::new(connection.map_err(failed)?) })
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, work: impl FnOnce(&mut Connection) -> rusqlite::Result<T>) -> Result<T, SharedError> {
        work(&mut self.lock()).map_err(|source| SharedError::Index { path: self.path.clone(), source })
    }

    /// Where each of these chunks is, as far as it is known.
    pub(super) fn find(&self, manifest: &Manifest) -> Result<Vec<Option<Stored>>, SharedError> {
        self.with(|connection| {
            let mut statement = connection.prepare_cached(
                "SELECT name, offset, stored FROM chunks JOIN packs ON packs.id = chunks.pack WHERE hash = ?1",
            )?;
            let row = |r: &rusqlite::Row<'_>| {
                Ok(Stored { pack: r.get::<_, [u8; 32]>(0)?, offset: r.get(1)?, stored: r.get(2)? })
            };
            manifest.chunks.iter().map(|c| statement.query_row([c.hash.as_slice()], row).optional()).collect()
        })
    }

    /// Takes in where a layer's chunks are. The first place that is known of a chunk stays.
    pub(super) fn learn(&self, digest: &Digest, manifest: &Manifest, places: &Places) -> Result<(), SharedError> {
        self.with(|connection| {
            let transaction = connection.transaction()?;
            let mut ids = Vec::with_capacity(places.packs.len());
            for pack in &places.packs {
                transaction
                    .prepare_cached("INSERT OR IGNORE INTO packs (name) VALUES (?1)")?
                    .execute([pack.as_slice()])?;
                let id: i64 = transaction
                    .prepare_cached("SELECT id FROM packs WHERE name = ?1")?
                    .query_row([pack.as_slice()], |r| r.get(0))?;
                ids.push(id);
            }
            {
                let mut insert = transaction.prepare_cached(
                    "INSERT OR IGNORE INTO chunks (hash, pack, offset, stored) VALUES (?1, ?2, ?3, ?4)",
                )?;
                for (chunk, place) in manifest.chunks.iter().zip(&places.chunks) {
                    insert.execute(params![
                        chunk.hash.as_slice(),
                        ids[place.pack as usize],
                        place.offset,
                        place.stored
                    ])?;
                }
            }
            transaction.execute("INSERT OR IGNORE INTO layers (digest) VALUES (?1)", [digest.as_bytes().as_slice()])?;
            transaction.commit()
        })
    }

    /// Layers that were taken in.
    pub(super) fn layers(&self) -> Result<HashSet<Digest>, SharedError> {
        self.with(|connection| {
            let mut statement = connection.prepare_cached("SELECT digest FROM layers")?;
            let rows = statement.query_map([], |r| r.get::<_, [u8; 32]>(0))?;
            rows.map(|row| row.map(Digest::from_bytes)).collect()
        })
    }

    /// Forgets packs that are gone, with what lies in them, and layers.
    pub(super) fn forget(&self, packs: &[Hash], layers: &[Digest]) -> Result<(), SharedError> {
        self.with(|connection| {
            let transaction = connection.transaction()?;
            for pack in packs {
                transaction.execute(
                    "DELETE FROM chunks WHERE pack = (SELECT id FROM packs WHERE name = ?1)",
                    [pack.as_slice()],
                )?;
                transaction.execute("DELETE FROM packs WHERE name = ?1", [pack.as_slice()])?;
            }
            for layer in layers {
                transaction.execute("DELETE FROM layers WHERE digest = ?1", [layer.as_bytes().as_slice()])?;
            }
            transaction.commit()
        })
    }
}

fn connect(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    connection.execute_batch(SCHEMA)?;
    Ok(connection)
}

#[cfg(test)]
mod tests {
    use super::*;
    use corral_format::places::Place;

    #[test]
    fn the_first_place_of_a_chunk_stays_until_its_pack_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let index = ChunkIndex::open(&dir.path().join("i")).unwrap();
        let manifest = Manifest::new(b"", [(5, [1; 32]), (6, [2; 32])]).unwrap();
        let at = |pack: u8| Places {
            packs: vec![[pack; 32]],
            chunks: vec![Place { pack: 0, offset: 0, stored: 5 }, Place { pack: 0, offset: 5, stored: 6 }],
        };
        let (one, two) = (Digest::of(b"1"), Digest::of(b"2"));
        assert_eq!(index.find(&manifest).unwrap(), [None, None]);
        index.learn(&one, &manifest, &at(7)).unwrap();
        index.learn(&two, &manifest, &at(8)).unwrap();
        let found = index.find(&manifest).unwrap();
        assert_eq!(found[1], Some(Stored { pack: [7; 32], offset: 5, stored: 6 }));
        assert_eq!(index.layers().unwrap(), HashSet::from([one, two]));
        index.forget(&[[7; 32]], &[one]).unwrap();
        assert_eq!(index.find(&manifest).unwrap(), [None, None]);
        assert_eq!(index.layers().unwrap(), HashSet::from([two]));
        drop(index);
        std::fs::write(dir.path().join("i"), "no database").unwrap();
        ChunkIndex::open(&dir.path().join("i")).unwrap();
    }
}
