//! Fetching a whole layer, as nodes do that do not read lazily.

use super::{SharedError, SharedLayers, keys};
use crate::store::LayerFiles;
use corral_api::digest::Digest;
use corral_format::manifest::{Chunk, Manifest};
use corral_format::places::{Place, Places};
use corral_format::unpack::Unpacker;
use futures_util::TryStreamExt as _;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Bytes fetched in one call.
const PIECE: u64 = 4 << 20;
/// Calls at a time.
const CALLS: usize = 8;

/// Neighbours in one pack.
struct Run {
    pack: u32,
    from: u64,
    to: u64,
    chunks: Vec<(Chunk, Place)>,
}

impl SharedLayers {
    /// Fetches all data of a layer, which is adopted first if need be. What is here already is not fetched again.
    ///
    /// # Errors
    /// As [`SharedLayers::adopt`]; a chunk that is not what the manifest names is `Damaged`.
    pub async fn pull(&self, digest: &Digest) -> Result<(), SharedError> {
        self.adopt(digest).await?;
        let digest = *digest;
        if self.blocking(move |this| Ok(this.local.is_complete(&digest)?)).await? {
            return Ok(());
        }
        let of = move |this: &Self| Ok((this.local.manifest(&digest)?, this.local.places(&digest).ok()));
        let (manifest, places) = self.blocking(of).await?;
        let places = match places {
            Some(places) => places,
            None => self.refresh_places(&digest, &manifest).await?,
        };
        let fetched = match self.fetch_data(&digest, &manifest, places).await {
            // Collected and published again meanwhile, perhaps: its chunks lie elsewhere then.
            Err(SharedError::Remote(e)) if e.kind() == corral_store::ErrorKind::NotFound => {
                let places = self.refresh_places(&digest, &manifest).await?;
                self.fetch_data(&digest, &manifest, places).await
            }
            other => other,
        };
        fetched?;
        self.blocking(move |this| Ok(this.local.note_complete(&digest)?)).await
    }

    /// Reads anew where a layer's chunks lie.
    pub(super) async fn refresh_places(&self, digest: &Digest, manifest: &Manifest) -> Result<Places, SharedError> {
        let places = self.places_of(digest, manifest).await?;
        let (digest, kept) = (*digest, places.clone());
        self.blocking(move |this| Ok(this.local.replace_places(&digest, &kept)?)).await?;
        Ok(places)
    }

    async fn fetch_data(&self, digest: &Digest, manifest: &Manifest, places: Places) -> Result<(), SharedError> {
        let digest = *digest;
        let data = LayerFiles::in_dir(&self.local.dir_of(&digest)).data;
        let file = OpenOptions::new().write(true).open(&data).map_err(|e| SharedError::io("open", &data, e))?;
        let file = Arc::new(file);
        let places = Arc::new(places);
        futures_util::stream::iter(runs(manifest, &places).into_iter().map(Ok))
            .try_for_each_concurrent(CALLS, |run| self.fetch_run(&digest, &places, file.clone(), run))
            .await
    }

    async fn fetch_run(
        &self,
        digest: &Digest,
        places: &Arc<Places>,
        file: Arc<File>,
        run: Run,
    ) -> Result<(), SharedError> {
        let key = keys::pack(&places.packs[run.pack as usize])?;
        let bytes = self.store.get_range(&key, run.from..run.to).await.map_err(SharedError::Remote)?;
        let digest = *digest;
        self.blocking(move |this| {
            let (mut unpacker, mut content) = (Unpacker::default(), Vec::new());
            for (chunk, place) in &run.chunks {
                let at = (place.offset - run.from) as usize;
                let stored = &bytes[at..at + place.stored as usize];
                unpacker
                    .unpack(chunk, *place, stored, &mut content)
                    .map_err(|e| SharedError::Damaged { digest, reason: e.to_string() })?;
                file.write_all_at(&content, chunk.offset)
                    .map_err(|e| SharedError::io("write", this.local.dir_of(&digest), e))?;
            }
            Ok(())
        })
        .await
    }
}

/// Puts chunks together that lie next to each other.
fn runs(manifest: &Manifest, places: &Places) -> Vec<Run> {
    let mut all: Vec<(Chunk, Place)> = manifest.chunks.iter().copied().zip(places.chunks.iter().copied()).collect();
    all.sort_by_key(|(_, place)| (place.pack, place.offset));
    let mut runs: Vec<Run> = Vec::new();
    for (chunk, place) in all {
        let end = place.offset + u64::from(place.stored);
        match runs.last_mut() {
            Some(run) if run.pack == place.pack && run.to == place.offset && end - run.from <= PIECE => {
                run.to = end;
                run.chunks.push((chunk, place));
            }
            _ => runs.push(Run { pack: place.pack, from: place.offset, to: end, chunks: vec![(chunk, place)] }),
        }
    }
    runs
}
