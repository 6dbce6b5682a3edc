//! Snapshots: a sandbox's upper directory as a layer, and the image it makes with the layers beneath.

use crate::config::CancelFlag;
use crate::error::ImportError;
use crate::import::without_repeats;
use crate::pack;
use crate::scrub::Scrub;
use crate::store::LayerStore;
use corral_api::digest::Digest;
use corral_api::image::{ImageConfig, ImageRecord, LayerKind, LayerRecord};
use std::path::Path;

/// A tree that became a layer.
#[derive(Debug, Clone)]
pub struct PackedTree {
    /// The layer.
    pub layer: LayerRecord,
    /// Whiteouts and opaque directories in it.
    pub deletions: u64,
    /// Paths that the rules left out: the first hundred.
    pub scrubbed: Vec<String>,
    /// How many were left out.
    pub scrubbed_count: u64,
}

impl LayerStore {
    /// Makes a layer of an overlay's upper directory, which must not change meanwhile, and publishes it here. Blocks.
    ///
    /// # Errors
    /// The tree cannot be read, has something no layer holds, or the host refuses; nothing stays behind then.
    pub fn pack_tree(&self, upper: &Path, scrub: &Scrub, cancel: &CancelFlag) -> Result<PackedTree, ImportError> {
        let work = self.work_dir()?;
        let packed = pack::pack(upper, &work.path().join("snapshot.data"), scrub, cancel)?;
        let layer = self.publish(&packed, LayerKind::Snapshot, "/")?;
        let tally = packed.tally;
        Ok(PackedTree {
            layer,
            deletions: tally.deletions,
            scrubbed: tally.scrubbed,
            scrubbed_count: tally.scrubbed_count,
        })
    }

    /// The image that stored layers make with one more on top.
    ///
    /// # Errors
    /// A layer is not here.
    pub fn image_of(
        &self,
        below: &[Digest],
        top: &LayerRecord,
        config: ImageConfig,
    ) -> Result<ImageRecord, ImportError> {
        let mut layers = below.iter().map(|d| self.get(d)).collect::<Result<Vec<_>, _>>()?;
        layers.push(top.clone());
        Ok(ImageRecord::new(String::new(), config, without_repeats(layers)))
    }
}
