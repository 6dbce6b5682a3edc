//! What the node must not forget when it dies: sandboxes, commands, idempotency keys and events, in SQLite.
//!
//! One thread writes. Everything that is waiting goes into one transaction, so a burst costs few commits. A commit is in
//! the write-ahead log, which survives the death of this process; it is not forced to the disk, because after the host's
//! death no sandbox lives either, and the file is consistent then.

mod read;
mod record;

pub use record::{CommandRecord, DEFAULT_BOUNDS, SandboxRecord, Within};

use corral_api::digest::Digest;
use corral_api::ids::SandboxId;
use corral_api::sandbox::Event;
use rusqlite::{Connection, params};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tokio::sync::{mpsc, oneshot};

/// Most sandboxes forgotten at a time, so that the writer is not held up.
pub const FORGET_BATCH: usize = 500;

/// A failure of the ledger.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The database refused.
    #[error("cannot {action} the ledger {path}")]
    Database {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: rusqlite::Error,
    },
    /// A record that cannot be read.
    #[error("a record of {what} in the ledger cannot be read")]
    Record {
        /// Which table.
        what: &'static str,
        /// Why not.
        #[source]
        source: serde_json::Error,
    },
    /// The writer is gone.
    #[error("the ledger is closed")]
    Closed,
}

/// A change.
#[derive(Debug, Clone)]
pub enum Change {
    /// A new or changed sandbox.
    Sandbox(Box<SandboxRecord>),
    /// A new or changed command.
    Command(Box<CommandRecord>),
    /// An idempotency key was used.
    Key {
        /// Whose.
        project: String,
        /// Which.
        key: String,
        /// Over the body.
        body: Digest,
        /// For which sandbox.
        sandbox: SandboxId,
        /// When.
        at_ms: u64,
    },
    /// Something happened.
    Event(Box<Event>),
    /// Forget an ended sandbox with its commands.
    Forget(SandboxId),
    /// Forget keys and old events of forgotten sandboxes, and all but so many events.
    Trim {
        /// Milliseconds since 1970.
        before_ms: u64,
        /// Most events kept.
        events: u64,
    },
}

struct Write {
    changes: Vec<Change>,
    done: Option<oneshot::Sender<Result<(), LedgerError>>>,
}

/// The ledger.
pub struct Ledger {
    path: PathBuf,
    queue: mpsc::UnboundedSender<Write>,
    reader: Mutex<Connection>,
    writer: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ledger").field("path", &self.path).finish_non_exhaustive()
    }
}

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS sandboxes (
    id TEXT PRIMARY KEY, ended INTEGER NOT NULL, changed_ms INTEGER NOT NULL, record TEXT NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS sandboxes_ended ON sandboxes (ended, changed_ms);
CREATE TABLE IF NOT EXISTS commands (
    sandbox TEXT NOT NULL, id TEXT NOT NULL, record TEXT NOT NULL, PRIMARY KEY (sandbox, id)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (
    project TEXT NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL, sandbox TEXT NOT NULL, at_ms INTEGER NOT NULL,
    PRIMARY KEY (project, key)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, sandbox TEXT NOT NULL, event TEXT NOT NULL) STRICT;
";
/// Version of the schema above, in SQLite's user_version.
const SCHEMA_VERSION: i64 = 1;

impl Ledger {
    /// Opens or makes the ledger. A file that is damaged is put aside, and an empty one begun: what it described is
    /// then found on the host and removed.
    ///
    /// # Errors
    /// When no ledger can be made, or it was written by a later version.
    pub fn open(path: &Path) -> Result<Self, LedgerError> {
        let connection = match connect(path) {
            Ok(connection) => connection,
            Err(error) if is_damage(&error) => {
                let aside = path.with_extension(format!("damaged-{}", crate::clock::now_ms()));
                for ending in ["", "-wal", "-shm"] {
                    let from = PathBuf::from(format!("{}{ending}", path.display()));
                    // Only the first is sure to exist.
                    std::fs::rename(&from, format!("{}{ending}", aside.display())).unwrap_or(());
                }
                tracing::error!(error = %crate::error::chain(&error), aside = %aside.display(), "the ledger is damaged and was put aside");
                connect(path)?
            }
            Err(error) => return Err(error),
        };
        let reader = connect(path)?;
        let (queue, changes) = mpsc::unbounded_channel();
        let name = path.to_owned();
        let writer = std::thread::Builder::new()
            .name("ledger".into())
            .spawn(move || write_all(connection, &name, changes))
            .map_err(|_| LedgerError::Closed)?;
        Ok(Self { path: path.to_owned(), queue, reader: Mutex::new(reader), writer: Mutex::new(Some(writer)) })
    }

    /// A ledger in memory: what a node that is only to be ended begins with where the file cannot be used.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn in_memory() -> Result<Self, LedgerError> {
        // Shared, since reader and writer have a connection each.
        Self::open(Path::new("file:corral-ledger?mode=memory&cache=shared"))
    }

    /// Writes changes and waits until they are in the log.
    ///
    /// # Errors
    /// When the database refuses.
    pub async fn write(&self, changes: Vec<Change>) -> Result<(), LedgerError> {
        let (done, wait) = oneshot::channel();
        self.queue.send(Write { changes, done: Some(done) }).map_err(|_| LedgerError::Closed)?;
        wait.await.map_err(|_| LedgerError::Closed)?
    }

    /// Writes changes some time soon, in order with all others. A failure is logged.
    pub fn post(&self, changes: Vec<Change>) {
        if self.queue.send(Write { changes, done: None }).is_err() {
            tracing::error!("the ledger is closed: a change was lost");
        }
    }

    /// Waits until what was posted before is in the log, where reads see it.
    ///
    /// # Errors
    /// When the database refuses.
    pub async fn settle(&self) -> Result<(), LedgerError> {
        self.write(Vec::new()).await
    }

    fn lock_reader(&self) -> std::sync::MutexGuard<'_, Connection> {
        self.reader.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn failed(&self, action: &'static str) -> impl Fn(rusqlite::Error) -> LedgerError + '_ {
        move |source| LedgerError::Database { action, path: self.path.clone(), source }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // Closing the queue ends the writer after what is in it.
        let (closed, _) = mpsc::unbounded_channel();
        self.queue = closed;
        if let Some(writer) = self.writer.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take() {
            writer.join().unwrap_or(());
        }
    }
}

fn connect(path: &Path) -> Result<Connection, LedgerError> {
    let failed = |action: &'static str| move |source| LedgerError::Database { action, path: path.to_owned(), source };
    let connection = Connection::open(path).map_err(failed("open"))?;
    connection.pragma_update(None, "journal_mode", "WAL").map_err(failed("open"))?;
    connection.pragma_update(None, "synchronous", "NORMAL").map_err(failed("open"))?;
    connection.pragma_update(None, "busy_timeout", 10_000).map_err(failed("open"))?;
    let found: i64 = connection.pragma_query_value(None, "user_version", |r| r.get(0)).map_err(failed("read"))?;
    if found > SCHEMA_VERSION {
        let text = format!("it has version {found}, this program knows {SCHEMA_VERSION}");
        return Err(failed("use")(rusqlite::Error::InvalidParameterName(text)));
    }
    let sound: String = connection.pragma_query_value(None, "quick_check", |r| r.get(0)).map_err(failed("check"))?;
    if sound != "ok" {
        let damage = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT);
        return Err(failed("check")(rusqlite::Error::SqliteFailure(damage, Some(sound))));
    }
    connection.execute_batch(SCHEMA).map_err(failed("prepare"))?;
    connection.pragma_update(None, "user_version", SCHEMA_VERSION).map_err(failed("prepare"))?;
    Ok(connection)
}

fn is_damage(error: &LedgerError) -> bool {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
    matches!(error, LedgerError::Database { source: rusqlite::Error::SqliteFailure(e, _), .. }
        if matches!(e.code, DatabaseCorrupt | NotADatabase))
}

fn write_all(mut connection: Connection, path: &Path, mut queue: mpsc::UnboundedReceiver<Write>) {
    /// Most writes in one transaction.
    const BATCH: usize = 512;
    let mut batch = Vec::with_capacity(BATCH);
    let mut kept = Kept::default();
    while let Some(received) = kept.next(&mut queue, &mut batch, BATCH) {
        if received == 0 {
            // Not yet, then: it is tried again.
            kept.write(&mut connection).unwrap_or(());
            continue;
        }
        // What could not be written comes before what was asked for later.
        let result = kept.write(&mut connection).and_then(|()| write_batch(&mut connection, &batch));
        if let Err(error) = &result {
            tracing::error!(%error, "the ledger refused a batch");
        }
        // When a batch fails, each of its writes is tried alone, so that one bad change does not take others with it.
        for write in batch.drain(..) {
            let own = match &result {
                Ok(()) => Ok(()),
                Err(_) => kept
                    .write(&mut connection)
                    .and_then(|()| write_batch(&mut connection, std::slice::from_ref(&write))),
            };
            match (write.done, own) {
                (Some(done), own) => {
                    let failed = |source| LedgerError::Database { action: "write", path: path.to_owned(), source };
                    // Who waited may be gone.
                    done.send(own.map_err(failed)).unwrap_or(());
                }
                (None, Err(error)) if is_full(&error) => kept.keep(write.changes),
                (None, _) => {}
            }
        }
    }
    kept.write(&mut connection).unwrap_or_else(|error| tracing::error!(%error, "changes of the ledger are lost"));
}

/// Changes that nobody waits for and a full disk refused: written as soon as there is room.
#[derive(Default)]
struct Kept(std::collections::VecDeque<Vec<Change>>);

impl Kept {
    /// Most that are kept; beyond it the oldest are lost.
    const MOST: usize = 100_000;
    /// How long until they are tried again.
    const PAUSE: std::time::Duration = std::time::Duration::from_millis(500);

    fn keep(&mut self, changes: Vec<Change>) {
        if self.0.is_empty() {
            tracing::error!("the disk is full: changes of the ledger wait for room");
        }
        if self.0.len() == Self::MOST {
            self.0.pop_front();
        }
        self.0.push_back(changes);
    }

    /// Waits for writes; how many came, or 0 where what is kept is to be tried. Nothing at the end.
    fn next(&self, queue: &mut mpsc::UnboundedReceiver<Write>, batch: &mut Vec<Write>, most: usize) -> Option<usize> {
        if self.0.is_empty() {
            return Some(queue.blocking_recv_many(batch, most)).filter(|received| *received > 0);
        }
        match queue.try_recv() {
            Ok(write) => batch.push(write),
            Err(mpsc::error::TryRecvError::Empty) => std::thread::sleep(Self::PAUSE),
            Err(mpsc::error::TryRecvError::Disconnected) => return None,
        }
        Some(batch.len())
    }

    /// Writes what is kept.
    fn write(&mut self, connection: &mut Connection) -> rusqlite::Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let transaction = connection.transaction()?;
        for change in self.0.iter().flatten() {
            apply(&transaction, change)?;
        }
        transaction.commit()?;
        tracing::info!(changes = self.0.len(), "changes of the ledger that waited for room are written");
        self.0.clear();
        Ok(())
    }
}

fn is_full(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{CannotOpen, DiskFull, SystemIoFailure};
    matches!(error, rusqlite::Error::SqliteFailure(e, _) if matches!(e.code, DiskFull | SystemIoFailure | CannotOpen))
}

fn write_batch(connection: &mut Connection, batch: &[Write]) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    for change in batch.iter().flat_map(|w| &w.changes) {
        apply(&transaction, change)?;
    }
    transaction.commit()
}

fn json<T: serde::Serialize>(value: &T) -> rusqlite::Result<String> {
    serde_json::to_string(value).map_err(|e| rusqlite::Error::ToSqlConversionFailure(Box::new(e)))
}

fn apply(t: &rusqlite::Transaction<'_>, change: &Change) -> rusqlite::Result<()> {
    match change {
        Change::Sandbox(r) => {
            let ended = r.state == corral_api::sandbox::State::Ended;
            t.prepare_cached(
                "INSERT OR REPLACE INTO sandboxes (id, ended, changed_ms, record) VALUES (?1, ?2, ?3, ?4)",
            )?
            .execute(params![r.id.as_str(), ended, crate::clock::now_ms(), json(r)?])?;
        }
        Change::Command(r) => {
            t.prepare_cached("INSERT OR REPLACE INTO commands (sandbox, id, record) VALUES (?1, ?2, ?3)")?
                .execute(params![r.sandbox.as_str(), r.id.as_str(), json(r)?])?;
        }
        Change::Key { project, key, body, sandbox, at_ms } => {
            t.prepare_cached(
                "INSERT OR REPLACE INTO keys (project, key, body, sandbox, at_ms) VALUES (?1, ?2, ?3, ?4, ?5)",
            )?
            .execute(params![project, key, body.to_string(), sandbox.as_str(), at_ms])?;
        }
        Change::Event(e) => {
            t.prepare_cached("INSERT OR REPLACE INTO events (seq, at_ms, sandbox, event) VALUES (?1, ?2, ?3, ?4)")?
                .execute(params![e.seq, crate::clock::now_ms(), e.sandbox_id.as_str(), json(e)?])?;
        }
        Change::Forget(id) => {
            t.prepare_cached("DELETE FROM sandboxes WHERE id = ?1")?.execute([id.as_str()])?;
            t.prepare_cached("DELETE FROM commands WHERE sandbox = ?1")?.execute([id.as_str()])?;
        }
        Change::Trim { before_ms, events } => {
            t.prepare_cached("DELETE FROM keys WHERE sandbox NOT IN (SELECT id FROM sandboxes)")?.execute([])?;
            t.prepare_cached(
                "DELETE FROM events WHERE (at_ms < ?1 AND sandbox NOT IN (SELECT id FROM sandboxes))
                   OR seq <= (SELECT max(seq) FROM events) - ?2",
            )?
            .execute(params![before_ms, events])?;
        }
    }
    Ok(())
}
