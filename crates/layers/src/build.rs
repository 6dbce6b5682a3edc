//! Building one workspace or toolkit layer from a directory or a tar.

use crate::config::{CancelFlag, Limits, ProgressFn};
use crate::dircopy::DirCopy;
use crate::error::ImportError;
use crate::extract::{Budget, Expected, apply_stream};
use crate::import::{finish_layer, host_error};
use crate::paths;
use crate::stage::{Meta, Stage};
use crate::store::LayerStore;
use corral_api::image::{ImportProgress, LayerKind, LayerRecord};
use std::fs::File;
use std::path::PathBuf;

/// Where a layer's content comes from.
#[derive(Debug, Clone)]
pub enum LayerSource {
    /// A directory of the host; everything in it.
    Dir(PathBuf),
    /// A tar file, plain or compressed with gzip or zstd.
    Tar(PathBuf),
}

/// How a layer is built.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// What the layer is for.
    pub kind: LayerKind,
    /// Absolute, normalised directory of the sandbox that the content is placed at. Parents are root's, mode 0755.
    pub at: String,
    /// Owner given to all content of a directory source; kept as it is where not set.
    pub owner: Option<(u32, u32)>,
    /// Bounds of what is unpacked.
    pub limits: Limits,
    /// What messages call a tar source, instead of its path.
    pub source_name: Option<String>,
}

impl BuildOptions {
    /// Defaults for this kind and place: owners kept, default limits.
    pub fn new(kind: LayerKind, at: impl Into<String>) -> Self {
        Self { kind, at: at.into(), owner: None, limits: Limits::default(), source_name: None }
    }
}

impl LayerStore {
    /// Builds and publishes one layer. Blocks. Progress ends with [`ImportProgress::Built`].
    ///
    /// The record returned has the kind and place asked for, also where an equal layer was there already.
    ///
    /// # Errors
    /// A bad `at`, anything wrong with the source, or the host; nothing stays behind then.
    pub fn build_layer(
        &self,
        source: &LayerSource,
        options: &BuildOptions,
        cancel: &CancelFlag,
        progress: ProgressFn<'_>,
    ) -> Result<LayerRecord, ImportError> {
        let at = place(&options.at)?;
        let work = self.work_dir()?;
        let run = work.path().join("run");
        let mut stage = Stage::create(&run, None).map_err(|e| host_error(e, &run))?;
        let mut budget = Budget::new(options.limits);
        stage.put_dir(&at, &Meta::default_dir()).map_err(|e| host_error(e, &run))?;
        match source {
            LayerSource::Dir(dir) => {
                progress(ImportProgress::Planned { layers: 1, bytes: 0 });
                DirCopy { source: dir, at: &at, owner: options.owner, cancel }.run(&mut stage, &mut budget)?;
            }
            LayerSource::Tar(path) => {
                if options.owner.is_some() {
                    return Err(ImportError::InvalidRequest(
                        "an owner can be set for a directory source only".to_owned(),
                    ));
                }
                let io = |e| ImportError::source(path, e);
                let file = File::open(path).map_err(io)?;
                let size = file.metadata().map_err(io)?.len();
                progress(ImportProgress::Planned { layers: 1, bytes: size });
                let name = options.source_name.clone().unwrap_or_else(|| path.display().to_string());
                let expected =
                    Expected { name, codec: None, size: None, digest: None, diff_id: None, whiteouts: false };
                let mut reported = 0;
                let on_bytes = |bytes: u64| {
                    if bytes >= reported + (4 << 20) || bytes == size {
                        reported = bytes;
                        progress(ImportProgress::Fetched { layer: 0, bytes });
                    }
                };
                apply_stream(&mut stage, &at, file, &expected, &mut budget, cancel, on_bytes)?;
            }
        }
        if budget.devices_dropped + budget.sockets_dropped > 0 {
            let (devices, sockets) = (budget.devices_dropped, budget.sockets_dropped);
            tracing::warn!(at = %options.at, devices, sockets, "device nodes and sockets were left out");
        }
        progress(ImportProgress::Building { layer: 0 });
        let layer = finish_layer(self, stage, &run, (options.kind, &options.at), cancel)?;
        progress(ImportProgress::Stored { digest: layer.digest, bytes: layer.size_bytes });
        progress(ImportProgress::Built { layer: layer.clone() });
        Ok(layer)
    }
}

/// Components of an absolute, normalised path.
fn place(at: &str) -> Result<Vec<&[u8]>, ImportError> {
    let refuse = || ImportError::InvalidRequest(format!("{at:?} is not an absolute, normalised path"));
    if at == "/" {
        return Ok(Vec::new());
    }
    let inner = at.strip_prefix('/').ok_or_else(refuse)?;
    let parts = paths::components(inner.as_bytes()).map_err(|_| refuse())?;
    if parts.join(&b'/') == inner.as_bytes() { Ok(parts) } else { Err(refuse()) }
}
