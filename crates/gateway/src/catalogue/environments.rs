//! Environments: named specifications.

use super::{Catalogue, CatalogueError, Listed, NOW, Page, check_name, compose, layers, page};
use corral_api::environment::{EnvironmentRecord, EnvironmentSpec};
use rusqlite::{Connection, OptionalExtension as _};

pub(super) fn find(
    connection: &Connection,
    project: &str,
    name: &str,
) -> Result<Option<EnvironmentRecord>, CatalogueError> {
    connection
        .prepare_cached("SELECT record FROM environments WHERE project_id = ?1 AND name = ?2")
        .and_then(|mut s| s.query_row((project, name), |row| row.get::<_, String>(0)).optional())
        .map_err(|source| CatalogueError::Sql { op: "looking up an environment", source })?
        .map(|text| {
            serde_json::from_str(&text).map_err(|source| CatalogueError::Damaged {
                what: "environment",
                name: name.into(),
                source,
            })
        })
        .transpose()
}

impl Catalogue {
    /// Stores an environment; one of this name is replaced. Sandboxes that exist keep what they were made of.
    ///
    /// # Errors
    /// The name or the specification is not allowed, it names an image or layer that does not exist, or the database
    /// fails.
    pub fn put_environment(
        &self,
        project: &str,
        name: &str,
        spec: EnvironmentSpec,
    ) -> Result<EnvironmentRecord, CatalogueError> {
        check_name("environment", name)?;
        let sql = |source| CatalogueError::Sql { op: "storing an environment", source };
        self.write("storing an environment", |tx| {
            compose::compose(tx, project, name, &spec)?;
            let created_at: String = match find(tx, project, name)? {
                Some(before) => before.created_at,
                None => tx.query_row(&format!("SELECT {NOW}"), [], |row| row.get(0)).map_err(sql)?,
            };
            let record = EnvironmentRecord { name: name.into(), spec, created_at };
            tx.execute("DELETE FROM environments WHERE project_id = ?1 AND name = ?2", (project, name)).map_err(sql)?;
            tx.execute(
                "INSERT INTO environments (project_id, name, base, record) VALUES (?1, ?2, ?3, ?4)",
                (project, name, &record.spec.base, layers::to_json("environment", name, &record)?),
            )
            .map_err(sql)?;
            for digest in record.spec.workspaces.iter().chain(&record.spec.toolkits) {
                tx.execute(
                    "INSERT OR IGNORE INTO environment_layers (project_id, environment, digest) VALUES (?1, ?2, ?3)",
                    (project, name, digest.to_string()),
                )
                .map_err(sql)?;
            }
            Ok(record)
        })
    }

    /// Environments of a project, by name.
    ///
    /// # Errors
    /// The database fails or a record is damaged.
    pub fn environments(&self, project: &str, page: &Page) -> Result<Listed<EnvironmentRecord>, CatalogueError> {
        page::list(&self.connection(), ("environments", "name"), project, "environment", page)
    }

    /// An environment.
    ///
    /// # Errors
    /// There is none, or the database fails.
    pub fn environment(&self, project: &str, name: &str) -> Result<EnvironmentRecord, CatalogueError> {
        find(&self.connection(), project, name)?
            .ok_or_else(|| CatalogueError::NotFound { what: "environment", name: name.into() })
    }

    /// Deletes an environment.
    ///
    /// # Errors
    /// There is none, or the database fails.
    pub fn delete_environment(&self, project: &str, name: &str) -> Result<(), CatalogueError> {
        self.write("deleting an environment", |tx| {
            let deleted = tx
                .execute("DELETE FROM environments WHERE project_id = ?1 AND name = ?2", (project, name))
                .map_err(|source| CatalogueError::Sql { op: "deleting an environment", source })?;
            if deleted == 0 {
                return Err(CatalogueError::NotFound { what: "environment", name: name.into() });
            }
            Ok(())
        })
    }
}
