//! Reading the ledger. All calls block shortly; the async side calls them on a blocking thread.

use super::{CommandRecord, FORGET_BATCH, Ledger, LedgerError, SandboxRecord};
use corral_api::digest::Digest;
use corral_api::ids::{CommandId, SandboxId};
use corral_api::sandbox::Event;
use rusqlite::{OptionalExtension, params};

fn parse<T: serde::de::DeserializeOwned>(what: &'static str, text: &str) -> Result<T, LedgerError> {
    serde_json::from_str(text).map_err(|source| LedgerError::Record { what, source })
}

impl Ledger {
    /// A value kept for the node itself.
    ///
    /// # Errors
    /// When the database refuses.
    pub fn meta(&self, key: &str) -> Result<Option<String>, LedgerError> {
        let reader = self.lock_reader();
        reader
            .query_row("SELECT value FROM meta WHERE key = ?1", [key], |r| r.get(0))
            .optional()
            .map_err(self.failed("read"))
    }

    /// Sets a value kept for the node itself.
    ///
    /// # Errors
    /// When the database refuses.
    pub fn set_meta(&self, key: &str, value: &str) -> Result<(), LedgerError> {
        let reader = self.lock_reader();
        reader
            .execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?1, ?2)", [key, value])
            .map(|_| ())
            .map_err(self.failed("write"))
    }

    /// Sandboxes that are not ended.
    ///
    /// # Errors
    /// When the database refuses. A record that cannot be read is left out, with a line in the log: its sandbox is then
    /// unknown and removed.
    pub fn live(&self) -> Result<Vec<SandboxRecord>, LedgerError> {
        self.sandboxes("SELECT record FROM sandboxes WHERE ended = 0", 0)
    }

    /// The newest ended sandboxes.
    ///
    /// # Errors
    /// As `live`.
    pub fn ended(&self, limit: u64) -> Result<Vec<SandboxRecord>, LedgerError> {
        self.sandboxes("SELECT record FROM sandboxes WHERE ended = 1 ORDER BY changed_ms DESC LIMIT ?1", limit)
    }

    fn sandboxes(&self, query: &str, limit: u64) -> Result<Vec<SandboxRecord>, LedgerError> {
        let reader = self.lock_reader();
        let mut statement = reader.prepare_cached(query).map_err(self.failed("read"))?;
        let takes_limit = statement.parameter_count() == 1;
        let map = |r: &rusqlite::Row<'_>| r.get::<_, String>(0);
        let rows = if takes_limit { statement.query_map([limit], map) } else { statement.query_map([], map) };
        let mut records = Vec::new();
        for row in rows.map_err(self.failed("read"))? {
            match parse::<SandboxRecord>("sandboxes", &row.map_err(self.failed("read"))?) {
                Ok(record) => records.push(record),
                Err(error) => {
                    tracing::error!(error = %crate::error::chain(&error), "a sandbox's record was passed over")
                }
            }
        }
        Ok(records)
    }

    /// One sandbox.
    ///
    /// # Errors
    /// When the database refuses or the record cannot be read.
    pub fn sandbox(&self, id: &SandboxId) -> Result<Option<SandboxRecord>, LedgerError> {
        let reader = self.lock_reader();
        let text: Option<String> = reader
            .query_row("SELECT record FROM sandboxes WHERE id = ?1", [id.as_str()], |r| r.get(0))
            .optional()
            .map_err(self.failed("read"))?;
        text.map(|t| parse("sandboxes", &t)).transpose()
    }

    /// Commands of a sandbox, oldest first.
    ///
    /// # Errors
    /// When the database refuses or a record cannot be read.
    pub fn commands(&self, sandbox: &SandboxId) -> Result<Vec<CommandRecord>, LedgerError> {
        let reader = self.lock_reader();
        let mut statement =
            reader.prepare_cached("SELECT record FROM commands WHERE sandbox = ?1").map_err(self.failed("read"))?;
        let rows = statement.query_map([sandbox.as_str()], |r| r.get::<_, String>(0)).map_err(self.failed("read"))?;
        let mut records: Vec<CommandRecord> = Vec::new();
        for row in rows {
            records.push(parse("commands", &row.map_err(self.failed("read"))?)?);
        }
        records.sort_by(|a, b| (a.started_ms, &a.id).cmp(&(b.started_ms, &b.id)));
        Ok(records)
    }

    /// One command.
    ///
    /// # Errors
    /// When the database refuses or the record cannot be read.
    pub fn command(&self, sandbox: &SandboxId, id: &CommandId) -> Result<Option<CommandRecord>, LedgerError> {
        let reader = self.lock_reader();
        let text: Option<String> = reader
            .query_row(
                "SELECT record FROM commands WHERE sandbox = ?1 AND id = ?2",
                [sandbox.as_str(), id.as_str()],
                |r| r.get(0),
            )
            .optional()
            .map_err(self.failed("read"))?;
        text.map(|t| parse("commands", &t)).transpose()
    }

    /// Which sandbox an idempotency key was used for, with the digest of its body.
    ///
    /// # Errors
    /// When the database refuses.
    pub fn key(&self, project: &str, key: &str) -> Result<Option<(Digest, SandboxId)>, LedgerError> {
        let reader = self.lock_reader();
        let row: Option<(String, String)> = reader
            .query_row("SELECT body, sandbox FROM keys WHERE project = ?1 AND key = ?2", [project, key], |r| {
                Ok((r.get(0)?, r.get(1)?))
            })
            .optional()
            .map_err(self.failed("read"))?;
        Ok(row.and_then(|(body, sandbox)| Some((body.parse().ok()?, sandbox.parse().ok()?))))
    }

    /// Events after a sequence number, of one sandbox or of all.
    ///
    /// # Errors
    /// When the database refuses or an event cannot be read.
    pub fn events(&self, after: u64, sandbox: Option<&SandboxId>, limit: u32) -> Result<Vec<Event>, LedgerError> {
        let reader = self.lock_reader();
        let mut statement = reader
            .prepare_cached(
                "SELECT event FROM events WHERE seq > ?1 AND (?2 IS NULL OR sandbox = ?2) ORDER BY seq LIMIT ?3",
            )
            .map_err(self.failed("read"))?;
        let rows = statement
            .query_map(params![after, sandbox.map(SandboxId::as_str), limit], |r| r.get::<_, String>(0))
            .map_err(self.failed("read"))?;
        rows.map(|row| parse("events", &row.map_err(self.failed("read"))?)).collect()
    }

    /// First and last sequence number of the events kept.
    ///
    /// # Errors
    /// When the database refuses.
    pub fn event_range(&self) -> Result<(u64, u64), LedgerError> {
        let reader = self.lock_reader();
        reader
            .query_row("SELECT coalesce(min(seq), 0), coalesce(max(seq), 0) FROM events", [], |r| {
                Ok((r.get(0)?, r.get(1)?))
            })
            .map_err(self.failed("read"))
    }

    /// Ended sandboxes that are to be forgotten: older than a time, or beyond a count.
    ///
    /// # Errors
    /// When the database refuses.
    pub fn forgettable(&self, before_ms: u64, keep: u64) -> Result<Vec<SandboxId>, LedgerError> {
        let reader = self.lock_reader();
        let mut statement = reader
            .prepare_cached(
                "SELECT id FROM sandboxes WHERE ended = 1 AND (changed_ms < ?1 OR id IN
                   (SELECT id FROM sandboxes WHERE ended = 1 ORDER BY changed_ms DESC LIMIT -1 OFFSET ?2)) LIMIT ?3",
            )
            .map_err(self.failed("read"))?;
        let rows = statement
            .query_map(params![before_ms, keep, FORGET_BATCH], |r| r.get::<_, String>(0))
            .map_err(self.failed("read"))?;
        let mut ids = Vec::new();
        for row in rows {
            ids.extend(row.map_err(self.failed("read"))?.parse::<SandboxId>().ok());
        }
        Ok(ids)
    }
}
