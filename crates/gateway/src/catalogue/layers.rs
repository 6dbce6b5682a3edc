//! Layers: what is stored on the nodes and what refers to it.

use super::{Catalogue, CatalogueError, Listed, NOW, Page, build_cache, page};
use corral_api::digest::Digest;
use corral_api::image::LayerRecord;
use rusqlite::{Connection, OptionalExtension as _};
use serde::Serialize;

pub(super) fn to_json<T: Serialize>(what: &'static str, name: &str, record: &T) -> Result<String, CatalogueError> {
    serde_json::to_string(record).map_err(|source| CatalogueError::Damaged { what, name: name.into(), source })
}

pub(super) fn insert(connection: &Connection, project: &str, layer: &LayerRecord) -> Result<(), CatalogueError> {
    let name = layer.digest.to_string();
    let record = to_json("layer", &name, layer)?;
    connection
        .execute(
            &format!(
                "INSERT OR REPLACE INTO layers (project_id, digest, record, created_at) VALUES (?1, ?2, ?3, {NOW})"
            ),
            (project, name, record),
        )
        .map_err(|source| CatalogueError::Sql { op: "storing a layer", source })?;
    Ok(())
}

pub(super) fn find(
    connection: &Connection,
    project: &str,
    digest: &Digest,
) -> Result<Option<LayerRecord>, CatalogueError> {
    let name = digest.to_string();
    connection
        .prepare_cached("SELECT record FROM layers WHERE project_id = ?1 AND digest = ?2")
        .and_then(|mut s| s.query_row((project, &name), |row| row.get::<_, String>(0)).optional())
        .map_err(|source| CatalogueError::Sql { op: "looking up a layer", source })?
        .map(|text| {
            serde_json::from_str(&text).map_err(|source| CatalogueError::Damaged { what: "layer", name, source })
        })
        .transpose()
}

/// What refers to a layer.
pub(super) fn user_of(
    connection: &Connection,
    project: &str,
    digest: &Digest,
) -> Result<Option<String>, CatalogueError> {
    connection
        .prepare_cached(
            "SELECT 'environment', environment FROM environment_layers WHERE project_id = ?1 AND digest = ?2 \
             UNION ALL SELECT 'image', image FROM image_layers WHERE project_id = ?1 AND digest = ?2 LIMIT 1",
        )
        .and_then(|mut s| {
            s.query_row((project, digest.to_string()), |row| {
                Ok(format!("{} {:?}", row.get::<_, String>(0)?, row.get::<_, String>(1)?))
            })
            .optional()
        })
        .map_err(|source| CatalogueError::Sql { op: "looking up what uses a layer", source })
}

impl Catalogue {
    /// Stores a layer's record.
    ///
    /// # Errors
    /// The database fails.
    pub fn put_layer(&self, project: &str, layer: &LayerRecord) -> Result<(), CatalogueError> {
        self.write("storing a layer", |tx| insert(tx, project, layer))
    }

    /// Digests of all layers of all projects.
    ///
    /// # Errors
    /// The database fails or a digest is damaged.
    pub fn all_layers(&self) -> Result<Vec<Digest>, CatalogueError> {
        let sql = |source| CatalogueError::Sql { op: "listing the layers", source };
        let connection = self.connection();
        let mut statement = connection.prepare_cached("SELECT DISTINCT digest FROM layers").map_err(sql)?;
        let rows = statement.query_map([], |row| row.get::<_, String>(0)).map_err(sql)?;
        let mut digests = Vec::new();
        for row in rows {
            let text = row.map_err(sql)?;
            // One that cannot be read may be needed: nothing is collected then.
            let digest = text.parse().map_err(|_| CatalogueError::BadName { what: "layer", name: text })?;
            digests.push(digest);
        }
        Ok(digests)
    }

    /// Layers of a project, by digest.
    ///
    /// # Errors
    /// The database fails or a record is damaged.
    pub fn layers(&self, project: &str, page: &Page) -> Result<Listed<LayerRecord>, CatalogueError> {
        page::list(&self.connection(), ("layers", "digest"), project, "layer", page)
    }

    /// Deletes a layer's record, and returns it so that it can be put back when no node can delete the layer.
    ///
    /// # Errors
    /// There is no such layer, an image or environment refers to it, or the database fails.
    pub fn delete_layer(&self, project: &str, digest: &Digest) -> Result<LayerRecord, CatalogueError> {
        self.write("deleting a layer", |tx| {
            let name = digest.to_string();
            let Some(record) = find(tx, project, digest)? else {
                return Err(CatalogueError::NotFound { what: "layer", name });
            };
            if let Some(by) = user_of(tx, project, digest)? {
                return Err(CatalogueError::InUse { what: "layer", name, by });
            }
            build_cache::forget(tx, project, digest)?;
            tx.execute("DELETE FROM layers WHERE project_id = ?1 AND digest = ?2", (project, &name))
                .map_err(|source| CatalogueError::Sql { op: "deleting a layer", source })?;
            Ok(record)
        })
    }
}
