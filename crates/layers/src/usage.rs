//! What layers take on this node.

use crate::error::StoreError;
use crate::store::{LayerFiles, LayerStore};
use corral_api::catalogue::LayerUsage;
use std::os::unix::fs::MetadataExt;

impl LayerStore {
    /// What each layer takes here. Whether it is in a shared store is not known here. Blocks.
    ///
    /// # Errors
    /// The store cannot be read. A layer that is damaged or goes meanwhile is left out.
    pub fn usage(&self) -> Result<Vec<LayerUsage>, StoreError> {
        const SECTOR: u64 = 512;
        let mut out = Vec::new();
        for layer in self.list()? {
            let Ok(manifest) = self.manifest(&layer.digest) else { continue };
            let dir = self.dir_of(&layer.digest);
            let files = LayerFiles::in_dir(&dir);
            let others = ["manifest", "places", "present"].map(|name| dir.join(name));
            let paths = [files.meta, files.data].into_iter().chain(others);
            let local_bytes = paths.filter_map(|p| Some(p.metadata().ok()?.blocks() * SECTOR)).sum();
            let chunks = manifest.chunks.len() as u64;
            let local_chunks = match self.presence(&layer.digest, &manifest) {
                Ok(Some(present)) => present.iter().filter(|here| **here).count() as u64,
                _ => chunks,
            };
            out.push(LayerUsage {
                digest: layer.digest,
                size_bytes: manifest.size(),
                local_bytes,
                chunks,
                local_chunks,
                published: None,
                mounted: self.is_mounted(&layer.digest),
                reads: None,
            });
        }
        Ok(out)
    }
}
