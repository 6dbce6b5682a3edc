//! What the operator and the caller of an import set: limits, thresholds, cancellation.

use corral_api::image::{ImageConfig, ImportProgress};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Settings of a layer store.
#[derive(Debug, Clone)]
pub struct LayersConfig {
    /// Registry hosts (`host` or `host:port`) that may be spoken to without TLS, besides loopback.
    pub plain_http_hosts: Vec<String>,
    /// Layers of a registry image fetched at once.
    pub concurrent_fetches: usize,
    /// Whether a server of lazy reads offers the data of layers that are not wholly here, below `lazy/`.
    pub lazy_reads: bool,
}

impl Default for LayersConfig {
    fn default() -> Self {
        Self { plain_http_hosts: Vec::new(), concurrent_fetches: 3, lazy_reads: false }
    }
}

/// Bounds of what one import or build may unpack.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Unpacked bytes of all source layers together, holes of sparse files included.
    pub max_unpacked_bytes: u64,
    /// Entries of all source layers together, implied directories included.
    pub max_entries: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_unpacked_bytes: 64 << 30, max_entries: 4_000_000 }
    }
}

/// How one image is imported.
#[derive(Debug, Clone)]
pub struct ImportOptions {
    /// Name the image is recorded under.
    pub name: String,
    /// `os/architecture[/variant]` picked from a multi-platform index.
    pub platform: String,
    /// Which image of an archive or layout that holds several: a repository tag or reference name.
    pub select: Option<String>,
    /// Configuration of a rootfs source; sources with a configuration of their own ignore it.
    pub config: ImageConfig,
    /// A run of source layers is closed once it has unpacked this many bytes, unless it is the last that an image may
    /// have.
    pub run_bytes: u64,
    /// Bounds of what is unpacked.
    pub limits: Limits,
    /// What messages call a source that is a file of this host, instead of its path.
    pub source_name: Option<String>,
}

impl ImportOptions {
    /// What messages call a source.
    pub(crate) fn shown(&self, path: &Path) -> String {
        self.source_name.clone().unwrap_or_else(|| path.display().to_string())
    }

    /// Defaults under this name: `linux/amd64`, runs of 64 MiB, default limits.
    pub fn named(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            platform: "linux/amd64".to_owned(),
            select: None,
            config: ImageConfig::default(),
            // What images of a stack share stays a layer of its own, which a node has once: already the smallest bases
            // of distributions are larger. Layers below this are not worth a mount.
            run_bytes: 64 << 20,
            limits: Limits::default(),
            source_name: None,
        }
    }
}

/// Receives the lines of progress, on the thread that imports.
pub type ProgressFn<'a> = &'a (dyn Fn(ImportProgress) + Send + Sync);

/// Tells a running import to stop. Clones share one flag; it is looked at between entries and chunks.
#[derive(Debug, Clone, Default)]
pub struct CancelFlag(Arc<AtomicBool>);

impl CancelFlag {
    /// A flag that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks the import to stop and clean up.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
