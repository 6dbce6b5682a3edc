//! Taking a published layer in without its data: it can be mounted at once, and its data is read from the store.

use super::{MOST_BYTES, SharedError, SharedLayers, keys};
use crate::store::Arrival;
use corral_api::digest::Digest;
use corral_api::image::{LayerKind, LayerRecord};
use corral_format::erofs::superblock;
use corral_format::manifest::Manifest;
use corral_format::places::Places;

/// A published layer's tables.
pub(super) struct Tables {
    pub(super) manifest: Manifest,
    pub(super) meta: Vec<u8>,
    pub(super) places: Places,
}

impl SharedLayers {
    /// Makes a published layer known to this node; one that is here stays as it is. Nothing of its data is read.
    ///
    /// # Errors
    /// The layer is not published, is damaged there, or the store or the host fails.
    pub async fn adopt(&self, digest: &Digest) -> Result<LayerRecord, SharedError> {
        if let Ok(here) = self.local.get(digest) {
            return Ok(here);
        }
        let digest = *digest;
        let Tables { manifest, meta, places } = self.tables(&digest).await?;
        // What a layer is for is said by the environment that names it.
        let entries = superblock::inodes(&meta).saturating_sub(1);
        let layer =
            LayerRecord { digest, kind: LayerKind::Base, at: "/".to_owned(), size_bytes: manifest.size(), entries };
        self.blocking(move |this| {
            this.index.learn(&digest, &manifest, &places)?;
            let arrival = Arrival { layer: layer.clone(), manifest: &manifest, meta: &meta, places: &places };
            this.local.arrive(&arrival)?;
            Ok(layer)
        })
        .await
    }

    /// Reads a layer's tables and checks them against its digest.
    pub(super) async fn tables(&self, digest: &Digest) -> Result<Tables, SharedError> {
        let manifest = self.manifest_of(digest).await?;
        let damaged = |reason: String| SharedError::Damaged { digest: *digest, reason };
        let most = MOST_BYTES.min(manifest.meta_len.saturating_mul(2).saturating_add(4096));
        let frame = self.store.get(&keys::meta(digest)?, most).await.map_err(SharedError::Remote)?;
        let meta = zstd::bulk::decompress(&frame, manifest.meta_len as usize)
            .map_err(|e| damaged(format!("its metadata cannot be unpacked: {e}")))?;
        if *blake3::hash(&meta).as_bytes() != manifest.meta_hash {
            return Err(damaged("its metadata is not what the manifest names".to_owned()));
        }
        let places = self.places_of(digest, &manifest).await?;
        Ok(Tables { manifest, meta, places })
    }

    pub(super) async fn places_of(&self, digest: &Digest, manifest: &Manifest) -> Result<Places, SharedError> {
        let frame = self.store.get(&keys::places(digest)?, MOST_BYTES).await.map_err(SharedError::Remote)?;
        Places::unpack(&frame, manifest.chunks.len()).map_err(|e| SharedError::format(digest, &e))
    }

    pub(super) async fn manifest_of(&self, digest: &Digest) -> Result<Manifest, SharedError> {
        let bytes = match self.store.get(&keys::manifest(digest)?, MOST_BYTES).await {
            Err(e) if e.kind() == corral_store::ErrorKind::NotFound => return Err(self.missing(digest).await),
            got => got.map_err(SharedError::Remote)?,
        };
        let actual = Digest::of(&bytes);
        if actual != *digest {
            let reason = format!("its manifest has digest {actual}");
            return Err(SharedError::Damaged { digest: *digest, reason });
        }
        Manifest::decode(&bytes).map_err(|e| SharedError::format(digest, &e))
    }

    /// What it means that there is no manifest of a layer.
    async fn missing(&self, digest: &Digest) -> SharedError {
        match self.holds_layers().await {
            Ok(true) => SharedError::NotFound(*digest),
            Ok(false) => SharedError::Empty { store: self.store.describe() },
            Err(error) => error,
        }
    }

    /// Whether there is anything of any layer. Looks at the beginning of the list only.
    ///
    /// # Errors
    /// The store cannot be listed.
    pub async fn holds_layers(&self) -> Result<bool, SharedError> {
        let prefix = keys::prefix(keys::LAYERS)?;
        corral_store::holds_any(&*self.store, &prefix).await.map_err(SharedError::Remote)
    }

    /// Takes in where chunks of all published layers are that this node does not know of. Returns how many layers were
    /// new. What cannot be read is left out, with a line in the log.
    ///
    /// # Errors
    /// The store cannot be listed, or the index fails.
    pub async fn learn_all(&self) -> Result<u64, SharedError> {
        let known = self.blocking(|this| this.index.layers()).await?;
        let mut new = 0;
        for digest in self.published().await? {
            if known.contains(&digest) {
                continue;
            }
            let tables = match self.tables(&digest).await {
                Ok(tables) => tables,
                Err(error) => {
                    tracing::warn!(%digest, %error, "a published layer is left out of the index");
                    continue;
                }
            };
            self.blocking(move |this| this.index.learn(&digest, &tables.manifest, &tables.places)).await?;
            new += 1;
        }
        Ok(new)
    }

    /// All published layers.
    ///
    /// # Errors
    /// The store cannot be listed.
    pub async fn published(&self) -> Result<Vec<Digest>, SharedError> {
        use futures_util::TryStreamExt as _;
        let prefix = keys::prefix(keys::LAYERS)?;
        let mut pages = self.store.list(Some(&prefix));
        let mut found = Vec::new();
        while let Some(page) = pages.try_next().await.map_err(SharedError::Remote)? {
            let named = page.iter().filter_map(|entry| keys::layer_of(&entry.key));
            found.extend(named.filter(|(_, part)| part == "manifest").map(|(digest, _)| digest));
        }
        found.sort_unstable();
        Ok(found)
    }
}
