//! Lists, page by page: a corpus has a hundred thousand environments.

use super::CatalogueError;
use rusqlite::Connection;
use serde::de::DeserializeOwned;

/// Which part of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// What lies behind this key only.
    pub after: String,
    /// The most records.
    pub limit: u32,
}

impl Default for Page {
    fn default() -> Self {
        Self { after: String::new(), limit: Self::USUAL }
    }
}

impl Page {
    /// The limit where none is asked for.
    pub const USUAL: u32 = 1_000;
    /// The largest limit.
    pub const MOST: u32 = 10_000;
}

/// A part of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed<T> {
    /// The records, by key.
    pub records: Vec<T>,
    /// The last key, where more follow.
    pub next: Option<String>,
}

/// Records of a table, by its key column. Table and column are constants of this crate.
pub(super) fn list<T: DeserializeOwned>(
    connection: &Connection,
    (table, key): (&'static str, &'static str),
    project: &str,
    what: &'static str,
    page: &Page,
) -> Result<Listed<T>, CatalogueError> {
    let query =
        format!("SELECT {key}, record FROM {table} WHERE project_id = ?1 AND {key} > ?2 ORDER BY {key} LIMIT ?3");
    // One more than asked for tells whether more follow.
    let mut rows: Vec<(String, String)> = connection
        .prepare_cached(&query)
        .and_then(|mut s| {
            s.query_map((project, &page.after, i64::from(page.limit) + 1), |row| Ok((row.get(0)?, row.get(1)?)))?
                .collect()
        })
        .map_err(|source| CatalogueError::Sql { op: "listing records", source })?;
    let more = rows.len() > page.limit as usize;
    rows.truncate(page.limit as usize);
    let next = rows.last().filter(|_| more).map(|(name, _)| name.clone());
    let records = rows
        .into_iter()
        .map(|(name, text)| {
            serde_json::from_str(&text).map_err(|source| CatalogueError::Damaged { what, name, source })
        })
        .collect::<Result<_, _>>()?;
    Ok(Listed { records, next })
}
