//! What is said over the control socket: one JSON object on each line, requests one way, answers the other.
//!
//! ```text
//! {"op":"open","layer":"HEX","class":"pytest"}   {"ok":{"chunks_present":0,"chunks_total":812}}
//! {"op":"events","after":{"epoch":7,"seq":12}}   {"ok":{"epoch":7,"gap":false}} and then a line for each event
//! {"op":"nonsense"}                              {"error":{"code":"invalid","message":"…"}}
//! ```

pub(crate) mod serve;

use crate::LayerId;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Bytes of the longest request.
pub const MAX_REQUEST: usize = 64 << 10;

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// A layer is about to be used by a task of this class: bring what such tasks read first, and learn it.
    Open {
        /// The layer.
        layer: LayerId,
        /// The class: one segment of a key.
        class: String,
    },
    /// Counters.
    Stats {},
    /// Drop what is known of a layer; its directory may go.
    Forget {
        /// The layer.
        layer: LayerId,
    },
    /// Drop the data of a layer that lies here; it is fetched again when it is read.
    Evict {
        /// The layer.
        layer: LayerId,
    },
    /// What happens, from after an event on.
    Events {
        /// The last one that was seen.
        #[serde(default)]
        after: Option<After>,
    },
    /// Go on as this program.
    Upgrade {
        /// Its absolute path.
        program: PathBuf,
    },
    /// Who answers.
    Who {},
}

/// An event that was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct After {
    /// Whose it was.
    pub epoch: u64,
    /// Its number.
    pub seq: u64,
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply<T> {
    /// It is done.
    Ok(T),
    /// It is not.
    Error(Refusal),
}

/// Why not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// What kind of reason.
    pub code: Code,
    /// The reason.
    pub message: String,
}

/// Kinds of reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// No such request, or not with these values.
    Invalid,
    /// The layer is not on this node.
    UnknownLayer,
    /// The layer's files cannot be used.
    Damaged,
    /// The other program will not do.
    NotReplaced,
}

/// A layer that was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// Chunks that are here.
    pub chunks_present: u64,
    /// Chunks it has.
    pub chunks_total: u64,
}

/// Data that was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evicted {
    /// Bytes of the disk that it took. They are free once nothing is mounted from them any more.
    pub freed_bytes: u64,
}

/// Nothing more to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {}

/// The beginning of a stream of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listening {
    /// Whose events follow.
    pub epoch: u64,
    /// Whether events may be missing before the first that follows: those of another process are gone with it.
    pub gap: bool,
}

/// A line of a stream of events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventLine {
    /// It happened.
    Event(EventRecord),
    /// So many happened that were dropped before they were sent.
    Lost(u64),
}

/// An event with its number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRecord {
    /// Counts from 1.
    pub seq: u64,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// What.
    #[serde(flatten)]
    pub event: Event,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// A reader was told EIO.
    ReadFailed {
        /// What it read.
        layer: LayerId,
        /// The chunk that is missing.
        chunk: u64,
        /// Its thread.
        pid: u32,
        /// Its cgroup, as the kernel names it.
        cgroup: Option<String>,
        /// Why.
        reason: String,
    },
    /// The store has other bytes than the layer says, again and again.
    CorruptChunk {
        /// The layer.
        layer: LayerId,
        /// The chunk.
        chunk: u64,
        /// The pack it was read from.
        pack: String,
        /// How often it was tried.
        tries: u32,
    },
    /// This server is in the place of one that ended without being told to.
    Restarted {
        /// How that one ended.
        cause: RestartCause,
    },
    /// All of a layer is here, and on the disk.
    Complete {
        /// The layer.
        layer: LayerId,
    },
    /// A trace was written to the store.
    TraceWritten {
        /// The layer.
        layer: LayerId,
        /// Of which class.
        class: String,
        /// Its entries.
        chunks: u64,
    },
}

/// Why a server was replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RestartCause {
    /// It ended: it was killed, or had a fault.
    Crashed,
    /// It did not answer and was killed for that.
    Still,
}

impl RestartCause {
    /// As a sentence about the server goes on.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Crashed => "it ended",
            Self::Still => "it stood still and was killed",
        }
    }
}

/// Servers of a mount that were replaced, since it was mounted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restarts {
    /// Because they ended.
    pub crashed: u64,
    /// Because they stood still.
    pub still: u64,
}

/// Counters of everything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Layers that are open, by name.
    pub layers: Vec<LayerStats>,
    /// All layers that this process ever had open, together.
    #[serde(default)]
    pub total: ReadStats,
    /// Who has read, by name; those who did so longest ago are left out when there are many.
    pub cgroups: Vec<CgroupStats>,
    /// Bytes under way now.
    pub in_flight_bytes: u64,
    /// Most bytes that were under way at once.
    pub in_flight_peak_bytes: u64,
    /// Reads that wait.
    pub waiting_reads: u64,
    /// Servers that were replaced.
    #[serde(default)]
    pub restarts: Restarts,
}

/// Counters of one layer, since this process opened it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerStats {
    /// The layer.
    pub layer: LayerId,
    /// Chunks that are here.
    pub chunks_present: u64,
    /// Chunks that readers asked for, here or not.
    #[serde(default)]
    pub chunks_touched: u64,
    /// Chunks it has.
    pub chunks_total: u64,
    /// Whether all is here and on the disk.
    pub complete: bool,
    /// Chunks on their way.
    pub in_flight: u64,
    /// What was read and fetched.
    #[serde(flatten)]
    pub reads: ReadStats,
}

/// What was read and fetched.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadStats {
    /// Bytes that readers asked for.
    pub read_bytes: u64,
    /// Reads of what was here.
    pub hits: u64,
    /// Reads that had to wait.
    pub misses: u64,
    /// Reads that failed.
    pub errors: u64,
    /// Bytes that came from the store.
    pub fetched_stored_bytes: u64,
    /// What they were unpacked.
    pub fetched_raw_bytes: u64,
    /// Of those from the store: ahead of readers.
    pub ahead_stored_bytes: u64,
    /// Of those from the store: by traces.
    pub trace_stored_bytes: u64,
    /// Chunks that were not what the manifest says.
    pub wrong_answers: u64,
    /// How long the store took.
    pub fetch_latency: FetchLatency,
}

/// A histogram.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchLatency {
    /// Upper bounds of all buckets but the last.
    pub bounds_us: Vec<u64>,
    /// Fetches in each bucket.
    pub counts: Vec<u64>,
    /// All fetches together.
    pub sum_us: u64,
}

/// What was read by and fetched for the processes of a cgroup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupStats {
    /// Its name as in `/proc/PID/cgroup`.
    pub cgroup: String,
    /// Bytes that they asked for: what the kernel has in memory is not asked for.
    #[serde(default)]
    pub read_bytes: u64,
    /// Bytes that came from the store.
    pub fetched_stored_bytes: u64,
    /// What they were unpacked.
    pub fetched_raw_bytes: u64,
}

/// Who answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Who {
    /// Version of the program.
    pub version: String,
    /// BLAKE3 of the program.
    pub build: String,
    /// The server's process.
    pub server_pid: i32,
    /// The holder's process.
    pub holder_pid: i32,
    /// Which server of this holder: its events have this epoch.
    pub epoch: u64,
    /// The root it serves.
    pub root: PathBuf,
    /// Whether the kernel hands requests out again after a crash (Linux 6.9).
    pub resends: bool,
}
