//! Images: names of imported layers and their configuration.

use super::{Catalogue, CatalogueError, Listed, NOW, Page, check_name, layers, page};
use corral_api::digest::Digest;
use corral_api::image::ImageRecord;
use rusqlite::{Connection, OptionalExtension as _};

pub(super) fn read(name: &str, text: &str) -> Result<ImageRecord, CatalogueError> {
    serde_json::from_str(text).map_err(|source| CatalogueError::Damaged { what: "image", name: name.into(), source })
}

/// Finds an image by name or, where the text is one, by digest.
pub(super) fn find(connection: &Connection, project: &str, name: &str) -> Result<ImageRecord, CatalogueError> {
    let query = if name.parse::<Digest>().is_ok() {
        "SELECT record FROM images WHERE project_id = ?1 AND digest = ?2 ORDER BY name LIMIT 1"
    } else {
        "SELECT record FROM images WHERE project_id = ?1 AND name = ?2"
    };
    connection
        .prepare_cached(query)
        .and_then(|mut s| s.query_row((project, name), |row| row.get::<_, String>(0)).optional())
        .map_err(|source| CatalogueError::Sql { op: "looking up an image", source })?
        .ok_or_else(|| CatalogueError::NotFound { what: "image", name: name.into() })
        .and_then(|text| read(name, &text))
}

impl Catalogue {
    /// Stores an image and its layers; an image of this name is replaced.
    ///
    /// # Errors
    /// The name is not allowed, or the database fails.
    pub fn put_image(&self, project: &str, image: &ImageRecord) -> Result<(), CatalogueError> {
        check_name("image", &image.name)?;
        let sql = |source| CatalogueError::Sql { op: "storing an image", source };
        let record = layers::to_json("image", &image.name, image)?;
        self.write("storing an image", |tx| {
            tx.execute("DELETE FROM images WHERE project_id = ?1 AND name = ?2", (project, &image.name))
                .map_err(sql)?;
            tx.execute(
                &format!(
                    "INSERT INTO images (project_id, name, digest, record, created_at) VALUES (?1, ?2, ?3, ?4, {NOW})"
                ),
                (project, &image.name, image.digest.to_string(), record),
            )
            .map_err(sql)?;
            for layer in &image.layers {
                layers::insert(tx, project, layer)?;
                tx.execute(
                    "INSERT OR IGNORE INTO image_layers (project_id, image, digest) VALUES (?1, ?2, ?3)",
                    (project, &image.name, layer.digest.to_string()),
                )
                .map_err(sql)?;
            }
            Ok(())
        })
    }

    /// Images of a project, by name.
    ///
    /// # Errors
    /// The database fails or a record is damaged.
    pub fn images(&self, project: &str, page: &Page) -> Result<Listed<ImageRecord>, CatalogueError> {
        page::list(&self.connection(), ("images", "name"), project, "image", page)
    }

    /// An image by name or digest.
    ///
    /// # Errors
    /// There is none, or the database fails.
    pub fn image(&self, project: &str, name: &str) -> Result<ImageRecord, CatalogueError> {
        find(&self.connection(), project, name)
    }

    /// Deletes an image's name and returns those of its layers that nothing refers to any more.
    ///
    /// # Errors
    /// There is no such image, an environment refers to it, or the database fails.
    pub fn delete_image(&self, project: &str, name: &str) -> Result<Vec<Digest>, CatalogueError> {
        let sql = |source| CatalogueError::Sql { op: "deleting an image", source };
        self.write("deleting an image", |tx| {
            let image = find(tx, project, name)?;
            let digest = image.digest.to_string();
            let twins: i64 = tx
                .query_row(
                    "SELECT count(*) FROM images WHERE project_id = ?1 AND digest = ?2",
                    (project, &digest),
                    |row| row.get(0),
                )
                .map_err(sql)?;
            // While another name has the same digest, references by digest stay good.
            let by_digest = if twins > 1 { "" } else { digest.as_str() };
            let user: Option<String> = tx
                .query_row(
                    "SELECT name FROM environments WHERE project_id = ?1 AND base IN (?2, ?3) ORDER BY name LIMIT 1",
                    (project, &image.name, by_digest),
                    |row| row.get(0),
                )
                .optional()
                .map_err(sql)?;
            if let Some(user) = user {
                let by = format!("environment {user:?}");
                return Err(CatalogueError::InUse { what: "image", name: image.name, by });
            }
            tx.execute("DELETE FROM images WHERE project_id = ?1 AND name = ?2", (project, &image.name))
                .map_err(sql)?;
            let mut orphans = Vec::new();
            for layer in &image.layers {
                if layers::user_of(tx, project, &layer.digest)?.is_none() {
                    orphans.push(layer.digest);
                }
            }
            Ok(orphans)
        })
    }
}
