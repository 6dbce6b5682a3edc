//! What steps of builds led to: the layers of a stage after a step, by the step's key.
//!
//! An entry is good while all its layers are there: a layer that is deleted takes its entries with it. The least
//! recently used entries go when there are too many, and with them the layers that nothing else refers to.

use super::{Catalogue, CatalogueError, layers};
use corral_api::digest::Digest;
use corral_api::image::{LayerKind, LayerRecord};
use rusqlite::{OptionalExtension as _, Transaction};
use std::collections::BTreeSet;

/// The most entries of a project.
pub const MAX_ENTRIES: u32 = 1000;

const OP: &str = "looking into the build cache";

impl Catalogue {
    /// The layers that a step led to, lowest first, if they are all there.
    ///
    /// # Errors
    /// The database fails or a record is damaged.
    pub fn built_step(&self, project: &str, key: &Digest) -> Result<Option<Vec<LayerRecord>>, CatalogueError> {
        let sql = |source| CatalogueError::Sql { op: OP, source };
        self.write_unseen(OP, |tx| {
            let name = key.to_string();
            let text: Option<String> = tx
                .query_row("SELECT layers FROM build_cache WHERE project_id = ?1 AND key = ?2", (project, &name), |r| {
                    r.get(0)
                })
                .optional()
                .map_err(sql)?;
            let Some(text) = text else { return Ok(None) };
            let damaged = |source| CatalogueError::Damaged { what: "build step", name: name.clone(), source };
            let digests: Vec<Digest> = serde_json::from_str(&text).map_err(damaged)?;
            let mut found = Vec::with_capacity(digests.len());
            for digest in &digests {
                match layers::find(tx, project, digest)? {
                    Some(layer) => found.push(layer),
                    None => {
                        tx.execute("DELETE FROM build_cache WHERE project_id = ?1 AND key = ?2", (project, &name))
                            .map_err(sql)?;
                        return Ok(None);
                    }
                }
            }
            let used = "UPDATE build_cache SET used_at = ?3 WHERE project_id = ?1 AND key = ?2";
            tx.execute(used, (project, &name, next_use(tx)?)).map_err(sql)?;
            Ok(Some(found))
        })
    }

    /// Remembers what a step led to. Returns layers that nothing refers to any more, to be deleted.
    ///
    /// # Errors
    /// The database fails.
    pub fn put_built_step(
        &self,
        project: &str,
        key: &Digest,
        built: &[LayerRecord],
        most: u32,
    ) -> Result<Vec<Digest>, CatalogueError> {
        const OP: &str = "filling the build cache";
        let sql = |source| CatalogueError::Sql { op: OP, source };
        self.write_unseen(OP, |tx| {
            let name = key.to_string();
            let digests: Vec<Digest> = built.iter().map(|l| l.digest).collect();
            let mut held = drop_entry(tx, project, &name)?;
            tx.execute(
                "INSERT INTO build_cache (project_id, key, layers, used_at) VALUES (?1, ?2, ?3, ?4)",
                (project, &name, layers::to_json("build step", &name, &digests)?, next_use(tx)?),
            )
            .map_err(sql)?;
            for layer in built {
                if layers::find(tx, project, &layer.digest)?.is_none() {
                    layers::insert(tx, project, layer)?;
                }
                tx.execute(
                    "INSERT OR IGNORE INTO build_cache_layers (project_id, digest, key) VALUES (?1, ?2, ?3)",
                    (project, layer.digest.to_string(), &name),
                )
                .map_err(sql)?;
            }
            for key in surplus(tx, project, most)? {
                held.extend(drop_entry(tx, project, &key)?);
            }
            orphans_of(tx, project, held)
        })
    }
}

/// A number that grows with each use: times may be equal.
fn next_use(tx: &Transaction<'_>) -> Result<i64, CatalogueError> {
    tx.query_row("SELECT coalesce(max(used_at), 0) + 1 FROM build_cache", [], |row| row.get(0))
        .map_err(|source| CatalogueError::Sql { op: OP, source })
}

/// The entries used least recently, beyond the most there may be.
fn surplus(tx: &Transaction<'_>, project: &str, most: u32) -> Result<Vec<String>, CatalogueError> {
    tx.prepare_cached("SELECT key FROM build_cache WHERE project_id = ?1 ORDER BY used_at DESC LIMIT -1 OFFSET ?2")
        .and_then(|mut s| s.query_map((project, most), |row| row.get(0))?.collect())
        .map_err(|source| CatalogueError::Sql { op: OP, source })
}

/// Removes an entry and tells which layers it held.
fn drop_entry(tx: &Transaction<'_>, project: &str, key: &str) -> Result<Vec<String>, CatalogueError> {
    let sql = |source| CatalogueError::Sql { op: "emptying the build cache", source };
    let held = tx
        .prepare_cached("SELECT digest FROM build_cache_layers WHERE project_id = ?1 AND key = ?2")
        .and_then(|mut s| s.query_map((project, key), |row| row.get(0))?.collect())
        .map_err(sql)?;
    tx.execute("DELETE FROM build_cache WHERE project_id = ?1 AND key = ?2", (project, key)).map_err(sql)?;
    Ok(held)
}

/// Those layers of builds that nothing refers to.
fn orphans_of(tx: &Transaction<'_>, project: &str, held: Vec<String>) -> Result<Vec<Digest>, CatalogueError> {
    const USERS: &str = "SELECT count(*) FROM build_cache_layers WHERE project_id = ?1 AND digest = ?2";
    let held: BTreeSet<Digest> = held.iter().filter_map(|text| text.parse().ok()).collect();
    let mut orphans = Vec::new();
    for digest in held {
        let users: i64 = tx
            .query_row(USERS, (project, digest.to_string()), |row| row.get(0))
            .map_err(|source| CatalogueError::Sql { op: OP, source })?;
        // Layers that were imported are the caller's.
        let ours = layers::find(tx, project, &digest)?.is_some_and(|l| l.kind == LayerKind::Snapshot);
        if ours && users == 0 && layers::user_of(tx, project, &digest)?.is_none() {
            orphans.push(digest);
        }
    }
    Ok(orphans)
}

/// Forgets every step that led to a layer.
pub(super) fn forget(tx: &Transaction<'_>, project: &str, digest: &Digest) -> Result<(), CatalogueError> {
    tx.execute(
        "DELETE FROM build_cache WHERE project_id = ?1 AND key IN \
         (SELECT key FROM build_cache_layers WHERE project_id = ?1 AND digest = ?2)",
        (project, digest.to_string()),
    )
    .map(drop)
    .map_err(|source| CatalogueError::Sql { op: "emptying the build cache", source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(content: &str) -> LayerRecord {
        let digest = Digest::of(content.as_bytes());
        LayerRecord { digest, kind: LayerKind::Snapshot, at: "/".into(), size_bytes: 1, entries: 1 }
    }

    #[test]
    fn steps_are_kept_while_their_layers_are() {
        let catalogue = Catalogue::in_memory().unwrap();
        let key = |text: &str| Digest::of(text.as_bytes());
        let put = |name: &str, layers: &[&str]| {
            let layers: Vec<_> = layers.iter().map(|l| layer(l)).collect();
            catalogue.put_built_step("default", &key(name), &layers, 3).unwrap()
        };
        assert!(put("1", &["a"]).is_empty());
        assert!(put("2", &["a", "b"]).is_empty());
        assert!(put("3", &["a", "c"]).is_empty());
        assert_eq!(catalogue.built_step("default", &key("2")).unwrap().unwrap(), [layer("a"), layer("b")]);
        assert!(catalogue.built_step("default", &key("1")).unwrap().is_some());
        assert_eq!(put("4", &["d"]), [Digest::of(b"c")], "3 was used least recently; a has other users");
        assert!(catalogue.built_step("default", &key("3")).unwrap().is_none());
        catalogue.delete_layer("default", &Digest::of(b"b")).unwrap();
        assert!(catalogue.built_step("default", &key("2")).unwrap().is_none());
        assert!(catalogue.built_step("default", &key("1")).unwrap().is_some());
        catalogue.delete_layer("default", &Digest::of(b"a")).unwrap();
        assert!(catalogue.built_step("default", &key("1")).unwrap().is_none());
        assert!(put("6", &["x"]).is_empty());
        assert_eq!(put("6", &["y"]), [Digest::of(b"x")], "what is built anew replaces what was");
        assert!(put("5", &[]).is_empty(), "a step may lead to no layer");
        assert_eq!(catalogue.built_step("default", &key("5")).unwrap().unwrap(), []);
    }
}
