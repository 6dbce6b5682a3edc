//! What the operator sets of a node.

use corral_layers::StoreConfig;
use corral_runtime::writable::WritableConfig;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// A store, as the operator named it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreUrl {
    /// The text.
    pub text: String,
    /// What it says.
    pub config: StoreConfig,
}

impl FromStr for StoreUrl {
    type Err = <StoreConfig as FromStr>::Err;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self { text: text.to_owned(), config: text.parse()? })
    }
}

/// Settings of a node.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Where everything is kept: ledger, layers, writable layers, logs, sockets.
    pub data_dir: PathBuf,
    /// Most sandboxes that are not ended. 0 = by the host's memory.
    pub max_live: u64,
    /// No sandbox is started while the host has less memory than this available.
    pub memory_floor_mib: u64,
    /// Sandboxes started at a time.
    pub start_slots: usize,
    /// Creates under way at a time, those that wait for a start slot included.
    pub start_queue: usize,
    /// How long ended sandboxes, their results and logs stay readable.
    pub keep_ended: Duration,
    /// Most output of ended commands kept for a sandbox that is live.
    pub keep_output_bytes: u64,
    /// Most ended sandboxes kept.
    pub keep_ended_count: u64,
    /// Space for writable layers.
    pub writable: WritableConfig,
    /// The node is only to be ended: nothing is taken of the host for it, keepers that do not answer are killed, and a
    /// ledger that cannot be used is done without.
    pub ending: bool,
    /// The store of layers that nodes share.
    pub store: Option<StoreUrl>,
    /// Layers are fetched whole before a sandbox starts on them, instead of as they are read.
    pub whole_layers: bool,
    /// Most bytes of data of layers that the shared store has as well; half of the disk where absent.
    pub cache_bytes: Option<u64>,
    /// Registry hosts that may be spoken to without TLS, besides loopback.
    pub plain_http_hosts: Vec<String>,
}

impl NodeConfig {
    /// For a node that is only to be ended.
    pub fn ending(data_dir: impl Into<PathBuf>) -> Self {
        let usual = Self::new(data_dir);
        // The space for writable layers never counts as low, so that it does not grow.
        let writable = WritableConfig { low_water_bytes: 0, ..usual.writable.clone() };
        Self { ending: true, writable, ..usual }
    }

    /// Defaults for a data directory.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            max_live: 0,
            memory_floor_mib: 512,
            start_slots: 16,
            start_queue: 4096,
            keep_ended: Duration::from_secs(24 * 3600),
            keep_output_bytes: 512 << 20,
            keep_ended_count: 20_000,
            writable: WritableConfig::default(),
            ending: false,
            store: None,
            whole_layers: false,
            cache_bytes: None,
            plain_http_hosts: Vec::new(),
        }
    }
}
