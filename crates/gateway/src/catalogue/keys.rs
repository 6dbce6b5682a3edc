//! API keys: `corral_` and 40 hex digits, of which only the SHA-256 is stored. The key has 160 random bits, so that a
//! plain hash cannot be searched for it.

use super::{Catalogue, CatalogueError, NOW};
use corral_api::catalogue::{KeyRecord, NewKey};
use rusqlite::OptionalExtension as _;
use sha2::{Digest as _, Sha256};
use std::sync::Arc;

const PREFIX: &str = "corral_";
const HEX_DIGITS: usize = 40;

/// Whose request it is, as its key says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedKey {
    /// The key's id.
    pub id: String,
    /// The project it acts for.
    pub project_id: String,
}

fn random_hex(bytes: usize) -> String {
    let mut raw = vec![0u8; bytes];
    // The operating system's generator does not fail once the machine is up.
    getrandom::fill(&mut raw).expect("the kernel's random generator answers");
    data_encoding::HEXLOWER.encode(&raw)
}

fn hash(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

fn is_key_text(key: &str) -> bool {
    key.strip_prefix(PREFIX).is_some_and(|hex| hex.len() == HEX_DIGITS && hex.bytes().all(|b| b.is_ascii_hexdigit()))
}

impl Catalogue {
    /// Makes a key. Its text is in the answer and nowhere else.
    ///
    /// # Errors
    /// The name is empty or too long, or the database fails.
    pub fn create_key(&self, project: &str, name: &str) -> Result<NewKey, CatalogueError> {
        if name.is_empty() || name.len() > 128 || name.chars().any(char::is_control) {
            return Err(CatalogueError::BadSpec("a key's name is 1–128 bytes without control characters".into()));
        }
        let key = format!("{PREFIX}{}", random_hex(HEX_DIGITS / 2));
        let id = format!("k{}", random_hex(6));
        self.write("storing a key", |tx| {
            tx.execute(
                &format!("INSERT INTO keys (id, project_id, name, sha256, created_at) VALUES (?1, ?2, ?3, ?4, {NOW})"),
                (&id, project, name, hash(&key)),
            )
            .map_err(|source| CatalogueError::Sql { op: "storing a key", source })
        })?;
        Ok(NewKey { id, name: name.into(), key })
    }

    /// The key if it was verified lately, without a database access.
    pub fn verified(&self, key: &str) -> Option<Arc<VerifiedKey>> {
        self.verified.get(&hash(key))
    }

    /// Looks a key up.
    ///
    /// # Errors
    /// The database fails.
    pub fn verify(&self, key: &str) -> Result<Option<Arc<VerifiedKey>>, CatalogueError> {
        if !is_key_text(key) {
            return Ok(None);
        }
        let digest = hash(key);
        let generation = self.verified.generation();
        let found = self
            .connection()
            .prepare_cached("SELECT id, project_id FROM keys WHERE sha256 = ?1")
            .and_then(|mut s| {
                s.query_row([digest], |row| Ok(VerifiedKey { id: row.get(0)?, project_id: row.get(1)? })).optional()
            })
            .map_err(|source| CatalogueError::Sql { op: "verifying a key", source })?
            .map(Arc::new);
        if let Some(key) = &found {
            self.verified.keep(generation, digest, key.clone());
        }
        Ok(found)
    }

    /// All keys of a project.
    ///
    /// # Errors
    /// The database fails.
    pub fn keys(&self, project: &str) -> Result<Vec<KeyRecord>, CatalogueError> {
        self.connection()
            .prepare_cached("SELECT id, name, project_id, created_at FROM keys WHERE project_id = ?1 ORDER BY id")
            .and_then(|mut s| {
                s.query_map([project], |row| {
                    Ok(KeyRecord {
                        id: row.get(0)?,
                        name: row.get(1)?,
                        project_id: row.get(2)?,
                        created_at: row.get(3)?,
                    })
                })?
                .collect()
            })
            .map_err(|source| CatalogueError::Sql { op: "listing keys", source })
    }

    /// Deletes a key, which is refused from then on.
    ///
    /// # Errors
    /// There is no such key, or it is the last one, or the database fails.
    pub fn delete_key(&self, project: &str, id: &str) -> Result<(), CatalogueError> {
        let sql = |source| CatalogueError::Sql { op: "deleting a key", source };
        self.write("deleting a key", |tx| {
            let deleted =
                tx.execute("DELETE FROM keys WHERE project_id = ?1 AND id = ?2", (project, id)).map_err(sql)?;
            if deleted == 0 {
                return Err(CatalogueError::NotFound { what: "key", name: id.into() });
            }
            let left: i64 = tx.query_row("SELECT count(*) FROM keys", [], |row| row.get(0)).map_err(sql)?;
            if left == 0 { Err(CatalogueError::LastKey(id.into())) } else { Ok(()) }
        })?;
        self.verified.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_known_until_deleted_and_its_text_is_not_stored() {
        let catalogue = Catalogue::in_memory().unwrap();
        let key = catalogue.create_key("default", "ci").unwrap();
        assert!(is_key_text(&key.key));
        assert!(catalogue.verified(&key.key).is_none());
        assert_eq!(catalogue.verify(&key.key).unwrap().unwrap().project_id, "default");
        assert!(catalogue.verified(&key.key).is_some());
        assert!(catalogue.verify(&format!("corral_{}", "0".repeat(40))).unwrap().is_none());
        assert!(matches!(catalogue.delete_key("default", &key.id), Err(CatalogueError::LastKey(_))));
        let other = catalogue.create_key("default", "other").unwrap();
        catalogue.delete_key("default", &key.id).unwrap();
        assert!(catalogue.verified(&key.key).is_none());
        assert!(catalogue.verify(&key.key).unwrap().is_none());
        assert_eq!(catalogue.keys("default").unwrap()[0].id, other.id);
        assert!(matches!(catalogue.delete_key("default", "k0"), Err(CatalogueError::NotFound { .. })));
    }

    #[test]
    fn a_catalogue_survives_and_a_later_version_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("catalogue.sqlite");
        let key = Catalogue::open(&path).unwrap().create_key("default", "a").unwrap();
        assert!(Catalogue::open(&path).unwrap().verify(&key.key).unwrap().is_some());
        rusqlite::Connection::open(&path).unwrap().pragma_update(None, "user_version", 99).unwrap();
        assert!(matches!(Catalogue::open(&path), Err(CatalogueError::Version { found: 99, .. })));
    }
}
