//! Removing from the shared store what nothing needs: layers that are not named, and packs that no layer refers to.
//!
//! A publisher writes packs before the table that refers to them. Before it refers to packs of others it takes away the
//! note that they are unneeded, and after its table is there it looks whether they still are. So nothing is removed before
//! it was unneeded for a grace period, counted from when it was written or, for a pack that lost its last layer, from when
//! that was noticed: a note in the store keeps that time. What this process makes or refers to it notes before, and a gc
//! in it leaves that alone however short the grace period is.

use super::{SharedError, SharedLayers, keys};
use corral_api::digest::Digest;
use corral_format::manifest::Hash;
use corral_store::{Key, ListEntry};
use futures_util::TryStreamExt as _;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, SystemTime};

/// What is kept, and whether anything is removed at all.
#[derive(Debug, Clone)]
pub struct GcRules {
    /// Layers that images, environments, snapshots or sandboxes name.
    pub needed: HashSet<Digest>,
    /// How long unneeded things stay. Longer than the longest publication.
    pub grace: Duration,
    /// Only tell what would be removed.
    pub dry_run: bool,
    /// When all that was made or used here before is among what is needed, or is not: what was made or used since stays,
    /// whatever the rest says, since nothing can name it yet.
    pub settled: SystemTime,
}

/// What was removed, or would be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GcReport {
    /// Layers.
    pub layers: Vec<Digest>,
    /// Number of packs.
    pub packs: u64,
    /// Bytes of the packs.
    pub pack_bytes: u64,
    /// Things that are not needed, but not long enough.
    pub waiting: u64,
    /// Bytes in packs that are needed for some of their chunks.
    pub kept_bytes: u64,
    /// Uploads that were cut off, which a directory store keeps until then. None in a dry run.
    pub unfinished: u64,
}

/// Notes of when a pack was first seen unneeded: empty objects whose time counts.
pub(super) const UNNEEDED: &str = "unneeded";

impl SharedLayers {
    /// Removes what is not needed. May be interrupted and repeated; only one should run at a time.
    ///
    /// # Errors
    /// The store fails; what was removed before stays removed.
    pub async fn gc(&self, rules: &GcRules) -> Result<GcReport, SharedError> {
        let _one = self.beside.collecting.lock().await;
        let now = SystemTime::now();
        let stays = |digest: &Digest| rules.needed.contains(digest) || self.local.made_since(digest, rules.settled);
        let old = |at: SystemTime| now.duration_since(at).unwrap_or_default() >= rules.grace;
        let mut report = GcReport::default();
        let mut layers: BTreeMap<Digest, Vec<ListEntry>> = BTreeMap::new();
        for entry in self.all(keys::LAYERS).await? {
            if let Some((digest, _)) = keys::layer_of(&entry.key) {
                layers.entry(digest).or_default().push(entry);
            }
        }
        // Before anything is removed.
        let packs = self.all(keys::PACKS).await?;
        let mut referred: HashSet<Hash> = HashSet::new();
        if packs.is_empty() && self.any_refers(layers.keys()).await? {
            return Err(SharedError::Hollow { store: self.store.describe() });
        }
        for (digest, entries) in &layers {
            let newest = entries.iter().map(|e| e.meta.modified).max().unwrap_or(now);
            if !stays(digest) && old(newest) && (rules.dry_run || self.remove_layer(digest, entries, rules).await?) {
                report.layers.push(*digest);
                continue;
            }
            report.waiting += u64::from(!rules.needed.contains(digest));
            // A layer that is being published may have no table yet.
            if entries.iter().any(|e| keys::layer_of(&e.key).is_some_and(|(_, part)| part == "places")) {
                referred.extend(self.packs_of(digest).await?);
            }
        }
        self.gc_packs(rules, packs, &referred, &old, &mut report).await?;
        if !rules.dry_run {
            // Uploads that go on began since; times of files are coarser than those of the clock.
            const COARSE: Duration = Duration::from_secs(1);
            let unsettled = SystemTime::now().duration_since(rules.settled).unwrap_or_default() + COARSE;
            report.unfinished = self.store.sweep(rules.grace.max(unsettled)).await.map_err(SharedError::Remote)?;
        }
        // A later gc asks for later times only.
        self.beside.packs.forget_before(rules.settled);
        self.local.settle_made(rules.settled);
        Ok(report)
    }

    async fn gc_packs(
        &self,
        rules: &GcRules,
        packs: Vec<ListEntry>,
        referred: &HashSet<Hash>,
        old: &(dyn Fn(SystemTime) -> bool + Sync),
        report: &mut GcReport,
    ) -> Result<(), SharedError> {
        let mut noted: HashMap<String, SystemTime> = HashMap::new();
        for entry in self.all(UNNEEDED).await? {
            let name = entry.key.segments().last().unwrap_or_default().to_owned();
            noted.insert(name, entry.meta.modified);
        }
        for entry in packs {
            let Some(name) = keys::pack_of(&entry.key) else { continue };
            let hex = keys::hex(&name);
            let note = Key::parse(format!("{UNNEEDED}/{hex}")).map_err(SharedError::Remote)?;
            let was_noted = noted.get(&hex).copied();
            if referred.contains(&name) {
                report.kept_bytes += entry.meta.size;
                if was_noted.is_some() && !rules.dry_run {
                    self.store.delete(&note).await.map_err(SharedError::Remote)?;
                }
                continue;
            }
            let unneeded_for_long = was_noted.is_some_and(old) || (rules.grace.is_zero() && old(entry.meta.modified));
            if !unneeded_for_long {
                report.waiting += 1;
                if was_noted.is_none() && !rules.dry_run {
                    self.store.put(&note, bytes::Bytes::new()).await.map_err(SharedError::Remote)?;
                }
                continue;
            }
            let _gate = self.beside.gate.write().await;
            if self.beside.packs.since(&name, rules.settled) {
                report.waiting += 1;
                continue;
            }
            report.packs += 1;
            report.pack_bytes += entry.meta.size;
            if !rules.dry_run {
                // A publisher elsewhere that refers to it takes the note away first.
                if was_noted.is_some() && self.store.head(&note).await.map_err(SharedError::Remote)?.is_none() {
                    continue;
                }
                self.blocking(move |this| this.index.forget(&[name], &[])).await?;
                self.store.delete(&entry.key).await.map_err(SharedError::Remote)?;
                self.store.delete(&note).await.map_err(SharedError::Remote)?;
            }
        }
        Ok(())
    }

    /// Removes a layer's objects, the manifest first: without it the layer does not exist. Says whether it did: one that
    /// was made or used meanwhile stays.
    async fn remove_layer(&self, digest: &Digest, entries: &[ListEntry], rules: &GcRules) -> Result<bool, SharedError> {
        let of = *digest;
        let _gate = self.beside.gate.write().await;
        if self.local.made_since(digest, rules.settled) {
            return Ok(false);
        }
        self.blocking(move |this| this.index.forget(&[], &[of])).await?;
        let manifest = keys::manifest(digest)?;
        self.store.delete(&manifest).await.map_err(SharedError::Remote)?;
        for entry in entries.iter().filter(|e| e.key != manifest) {
            self.store.delete(&entry.key).await.map_err(SharedError::Remote)?;
        }
        Ok(true)
    }

    /// Whether one of these layers refers to packs.
    async fn any_refers(&self, layers: impl Iterator<Item = &Digest>) -> Result<bool, SharedError> {
        for digest in layers {
            if !self.packs_of(digest).await?.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Packs that a layer's table refers to, be it published or on its way. A table that cannot be read stops the gc:
    /// its packs would be lost.
    async fn packs_of(&self, digest: &Digest) -> Result<Vec<Hash>, SharedError> {
        /// A table of some million chunks.
        const MOST: usize = 256 << 20;
        let frame = match self.store.get(&keys::places(digest)?, super::MOST_BYTES).await {
            Ok(frame) => frame,
            // Removed since it was listed.
            Err(e) if e.kind() == corral_store::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(SharedError::Remote(e)),
        };
        let places = corral_format::places::Places::unpack_any(&frame, MOST);
        Ok(places.map_err(|e| SharedError::format(digest, &e))?.packs)
    }

    /// All objects below a prefix.
    pub(super) async fn all(&self, prefix: &str) -> Result<Vec<ListEntry>, SharedError> {
        let prefix = keys::prefix(prefix)?;
        let pages: Vec<Vec<ListEntry>> =
            self.store.list(Some(&prefix)).try_collect().await.map_err(SharedError::Remote)?;
        Ok(pages.into_iter().flatten().collect())
    }
}
