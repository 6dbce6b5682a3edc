//! Importing an image: reading its manifest, applying its layers in runs, publishing what each run becomes.
//!
//! ```text
//! plan ─▶ run known? ──yes──▶ reuse ─┐
//!           │ no                     ├─▶ next run … ─▶ ImageRecord
//!           └─▶ apply layers until run_bytes ─▶ pack ─▶ publish ─▶ remember
//! ```

use crate::chain::{self, Chain};
use crate::config::{CancelFlag, ImportOptions, ProgressFn};
use crate::dircopy::DirCopy;
use crate::error::ImportError;
use crate::extract::{Budget, Expected, apply_stream};
use crate::lower::LowerView;
use crate::pack;
use crate::scrub::Scrub;
use crate::source::{self, Content, ImageSource, OpenedImage, SourceLayer};
use crate::stage::{Stage, StageError};
use crate::store::LayerStore;
use corral_api::digest::Digest;
use corral_api::image::{ImageRecord, ImportProgress, LayerKind, LayerRecord};
use std::path::Path;

impl LayerStore {
    /// Imports an image. Blocks, for minutes with a large image: call it on a blocking thread, outside of any async
    /// runtime's worker.
    ///
    /// Progress ends with [`ImportProgress::Imported`]; on failure the caller reports the error it is given.
    /// Setting `cancel` makes it return [`ImportError::Cancelled`] soon. Whatever the end, the staging directory is
    /// emptied; layers published before a failure stay, as they are whole and a second try reuses them.
    ///
    /// # Errors
    /// Anything wrong with the source, its content or the host; see [`ImportError`].
    pub fn import_image(
        &self,
        source: &ImageSource,
        options: &ImportOptions,
        cancel: &CancelFlag,
        progress: ProgressFn<'_>,
    ) -> Result<ImageRecord, ImportError> {
        let work = self.work_dir()?;
        let mut image = source::open(source, options, self.config(), work.path(), cancel)?;
        if image.layers.is_empty() {
            return Err(ImportError::NoLayers { source_name: image.name });
        }
        let bytes = image.layers.iter().filter_map(|l| l.size).sum();
        let count = u32::try_from(image.layers.len()).unwrap_or(u32::MAX);
        progress(ImportProgress::Planned { layers: count, bytes });
        let import = Import { store: self, options, cancel, progress, work: work.path() };
        let layers = without_repeats(import.all_runs(&mut image)?);
        let record = image_record(image, options, layers);
        progress(ImportProgress::Imported { image: record.clone() });
        Ok(record)
    }

    /// A directory of its own in `staging/`, removed with the handle.
    pub(crate) fn work_dir(&self) -> Result<tempfile::TempDir, ImportError> {
        let staging = self.staging_dir();
        tempfile::TempDir::new_in(&staging).map_err(|e| ImportError::io("make a directory in", staging, e))
    }
}

/// Most stored layers of an image: each is a lower directory of all its sandboxes.
const MOST_RUNS: usize = 32;

struct Import<'a> {
    store: &'a LayerStore,
    options: &'a ImportOptions,
    cancel: &'a CancelFlag,
    progress: ProgressFn<'a>,
    work: &'a Path,
}

impl Import<'_> {
    fn all_runs(&self, image: &mut OpenedImage) -> Result<Vec<LayerRecord>, ImportError> {
        let mut stored: Vec<LayerRecord> = Vec::new();
        let mut budget = Budget::new(self.options.limits);
        let mut next = 0;
        while next < image.layers.len() {
            let lower: Vec<Digest> = stored.iter().map(|l| l.digest).collect();
            let known: Option<Vec<Digest>> = image.layers[next..].iter().map(|l| l.diff_id).collect();
            if let Some(ids) = &known
                && let Some((covered, layer)) = chain::find(self.store, &lower, ids, self.run_bytes(stored.len()))
            {
                (self.progress)(ImportProgress::Stored { digest: layer.digest, bytes: layer.size_bytes });
                stored.push(LayerRecord { kind: LayerKind::Base, at: "/".to_owned(), ..layer });
                next += covered;
                continue;
            }
            // What is beneath is now known to be incomplete; everything from here on has to be fetched.
            image.fetch_from(next)?;
            let before = budget.bytes;
            let (layer, end) = self.one_run(image, next, &stored, &mut budget)?;
            let chain = Chain { digest: layer.digest, unpacked_bytes: budget.bytes - before };
            if let Some(ids) = &known {
                chain::remember(self.store, &lower, &ids[..end - next], self.run_bytes(stored.len()), &chain)?;
            }
            stored.push(layer);
            next = end;
        }
        if budget.devices_dropped + budget.sockets_dropped > 0 {
            let (devices, sockets) = (budget.devices_dropped, budget.sockets_dropped);
            tracing::warn!(image = %self.options.name, devices, sockets, "device nodes and sockets were left out");
        }
        Ok(stored)
    }

    /// What fills the run above so many others; nothing the last one.
    fn run_bytes(&self, below: usize) -> u64 {
        if below + 1 < MOST_RUNS { self.options.run_bytes } else { u64::MAX }
    }

    /// Applies layers from `first` on until the run is full. Returns the stored layer and the index after the run.
    fn one_run(
        &self,
        image: &mut OpenedImage,
        first: usize,
        below: &[LayerRecord],
        budget: &mut Budget,
    ) -> Result<(LayerRecord, usize), ImportError> {
        let files = below.iter().map(|l| self.store.check(&l.digest)).collect::<Result<Vec<_>, _>>()?;
        let run = self.work.join(format!("run-{first}"));
        let mut stage = Stage::create(&run, LowerView::open(&files)?).map_err(|e| host_error(e, &run))?;
        let before = budget.bytes;
        let mut next = first;
        let most = self.run_bytes(below.len());
        while next < image.layers.len() && (next == first || budget.bytes - before < most) {
            self.apply(&mut stage, image, next, budget)?;
            next += 1;
        }
        let index = u32::try_from(below.len()).unwrap_or(u32::MAX);
        (self.progress)(ImportProgress::Building { layer: index });
        let layer = finish_layer(self.store, stage, &run, (LayerKind::Base, "/"), self.cancel)?;
        (self.progress)(ImportProgress::Stored { digest: layer.digest, bytes: layer.size_bytes });
        std::fs::remove_dir_all(&run).map_err(|e| ImportError::io("remove", &run, e))?;
        Ok((layer, next))
    }

    fn apply(
        &self,
        stage: &mut Stage,
        image: &mut OpenedImage,
        index: usize,
        budget: &mut Budget,
    ) -> Result<(), ImportError> {
        let local = image.content(index, self.cancel, self.progress)?;
        let layer = &image.layers[index];
        match &layer.content {
            Content::Directory(source) => {
                DirCopy { source, at: &[], owner: None, cancel: self.cancel }.run(stage, budget)
            }
            _ => {
                let number = u32::try_from(index).unwrap_or(u32::MAX);
                // A registry's layer was reported while it was fetched.
                let report = !matches!(layer.content, Content::Remote);
                let mut reported = 0;
                let on_bytes = |bytes: u64| {
                    if report && (bytes >= reported + (4 << 20) || Some(bytes) == layer.size) {
                        reported = bytes;
                        (self.progress)(ImportProgress::Fetched { layer: number, bytes });
                    }
                };
                let raw = local.open()?;
                apply_stream(stage, &[], raw, &expected(layer), budget, self.cancel, on_bytes)?;
                local.discard()
            }
        }
    }
}

fn expected(layer: &SourceLayer) -> Expected {
    Expected {
        name: layer.name.clone(),
        codec: layer.codec,
        size: layer.size,
        digest: layer.digest,
        diff_id: layer.diff_id,
        whiteouts: layer.whiteouts,
    }
}

pub(crate) fn host_error(e: StageError, path: &Path) -> ImportError {
    match e {
        StageError::Io(e) => ImportError::io("stage in", path, e),
        StageError::Fault(fault) => {
            ImportError::Entry { source_name: path.display().to_string(), entry: ".".to_owned(), fault }
        }
    }
}

/// Builds and publishes what a stage holds.
pub(crate) fn finish_layer(
    store: &LayerStore,
    mut stage: Stage,
    run: &Path,
    (kind, at): (LayerKind, &str),
    cancel: &CancelFlag,
) -> Result<LayerRecord, ImportError> {
    stage.finish().map_err(|e| host_error(e, run))?;
    let packed = pack::pack(stage.host_path(), &run.with_extension("data"), &Scrub::default(), cancel)?;
    Ok(store.publish(&packed, kind, at)?)
}

/// Leaves each layer once, where it lies highest: overlayfs refuses a lower directory given twice (`ELOOP`).
///
/// The lower of two equal layers can go without a trace. All it holds, the upper one shows; all it hides, the upper one
/// hides as well; and a directory with whiteouts against it is still merged, since the upper one has that directory.
pub(crate) fn without_repeats(layers: Vec<LayerRecord>) -> Vec<LayerRecord> {
    let is_last = |at: usize| !layers[at + 1..].iter().any(|above| above.digest == layers[at].digest);
    (0..layers.len()).filter(|at| is_last(*at)).map(|at| layers[at].clone()).collect()
}

fn image_record(image: OpenedImage, options: &ImportOptions, layers: Vec<LayerRecord>) -> ImageRecord {
    ImageRecord {
        source_digest: image.source_digest,
        platform: image.platform,
        ..ImageRecord::new(options.name.clone(), image.config, layers)
    }
}
