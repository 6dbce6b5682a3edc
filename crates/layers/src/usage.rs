//! What layers take, on this node and in the shared store.

use crate::cache::cached_in;
use crate::error::StoreError;
use crate::store::{LayerFiles, LayerStore};
use corral_api::catalogue::LayerUsage;
use corral_format::manifest::Hash;
use corral_format::places::Places;
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;

impl LayerStore {
    /// What each layer takes here. Whether it is in a shared store is not known here. Blocks.
    ///
    /// # Errors
    /// The store cannot be read. A layer that is damaged or goes meanwhile is left out.
    pub fn usage(&self) -> Result<Vec<LayerUsage>, StoreError> {
        const SECTOR: u64 = 512;
        let (mut out, mut stored) = (Vec::new(), Stored::default());
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
            stored.add(self.places(&layer.digest).ok().as_ref());
            out.push(LayerUsage {
                digest: layer.digest,
                size_bytes: manifest.size(),
                local_bytes,
                chunks,
                local_chunks,
                cached_bytes: cached_in(layer.digest, &dir).map_or(0, |cached| cached.bytes),
                stored_bytes: None,
                shared_bytes: None,
                published: None,
                mounted: self.is_mounted(&layer.digest),
                reads: None,
            });
        }
        for (layer, found) in out.iter_mut().zip(stored.tell()) {
            (layer.stored_bytes, layer.shared_bytes) = found.unzip();
        }
        Ok(out)
    }
}

/// What layers refer to in the shared store.
#[derive(Default)]
struct Stored {
    packs: HashMap<Hash, u32>,
    /// How many layers refer to what lies in a pack at an offset.
    referred: HashMap<(u32, u64), u32>,
    /// For each layer, what it refers to: pack, offset and length.
    layers: Vec<Option<Vec<(u32, u64, u32)>>>,
}

impl Stored {
    /// The next layer, by its table of places, where it has one.
    fn add(&mut self, places: Option<&Places>) {
        let layer = places.map(|places| {
            let number = |pack: &Hash| {
                let next = self.packs.len() as u32;
                *self.packs.entry(*pack).or_insert(next)
            };
            let packs: Vec<u32> = places.packs.iter().map(number).collect();
            let at = |p: &corral_format::places::Place| Some((*packs.get(p.pack as usize)?, p.offset, p.stored));
            let mut chunks: Vec<_> = places.chunks.iter().filter_map(at).collect();
            chunks.sort_unstable();
            chunks.dedup();
            for (pack, offset, _) in &chunks {
                *self.referred.entry((*pack, *offset)).or_default() += 1;
            }
            chunks
        });
        self.layers.push(layer);
    }

    /// For each layer, bytes that it refers to, and how many of these other layers refer to as well.
    fn tell(&self) -> impl Iterator<Item = Option<(u64, u64)>> {
        let sum = |chunks: &Vec<(u32, u64, u32)>| {
            let is_shared = |(pack, offset, _): &&(u32, u64, u32)| self.referred[&(*pack, *offset)] > 1;
            let bytes = |(_, _, length): &(u32, u64, u32)| u64::from(*length);
            (chunks.iter().map(bytes).sum(), chunks.iter().filter(is_shared).map(bytes).sum())
        };
        self.layers.iter().map(move |layer| layer.as_ref().map(sum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use corral_format::places::Place;

    #[test]
    fn what_others_refer_to_as_well_is_shared() {
        let places = |packs: &[Hash], chunks: &[(u32, u64, u32)]| Places {
            packs: packs.to_vec(),
            chunks: chunks
                .iter()
                .map(|(pack, offset, stored)| Place { pack: *pack, offset: *offset, stored: *stored })
                .collect(),
        };
        let mut stored = Stored::default();
        stored.add(Some(&places(&[[1; 32], [2; 32]], &[(0, 0, 10), (0, 10, 20), (1, 0, 30), (1, 0, 30)])));
        stored.add(None);
        stored.add(Some(&places(&[[2; 32]], &[(0, 0, 30), (0, 30, 40)])));
        let told: Vec<_> = stored.tell().collect();
        assert_eq!(told, [Some((60, 30)), None, Some((70, 30))]);
    }
}
