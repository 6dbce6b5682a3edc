//! Which stored layer a run of source layers became, so that importing again need not unpack again.
//!
//! A run is known by the stored layers beneath it, the diff ids in it and, where a large layer ended it, the one that
//! follows. Where a run ends depends on the image and the threshold alone, never on what the store happens to hold, so
//! that two nodes agree on an image's digest.

use crate::record;
use crate::store::LayerStore;
use corral_api::digest::Digest;
use corral_api::image::LayerRecord;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::PathBuf;

/// Raise when the same source would give another stored layer.
const FORMAT: u32 = 3;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Chain {
    pub(crate) digest: Digest,
    /// What the run's layers unpacked to: whether it was full.
    pub(crate) unpacked_bytes: u64,
}

/// The diff ids of a run, and of the large layer that follows and ended it.
pub(crate) type Run<'a> = (&'a [Digest], Option<Digest>);

fn path(store: &LayerStore, lower: &[Digest], (diff_ids, follows): Run<'_>, large: u64) -> PathBuf {
    let key = json!({"format": FORMAT, "large": large, "lower": lower, "diff_ids": diff_ids, "follows": follows});
    store.chains_dir().join(format!("{}.json", record::canonical_digest(&key).hex()))
}

/// The run that begins these diff ids, if its stored layer is there: how many ids it covers, and the layer.
pub(crate) fn find(
    store: &LayerStore,
    lower: &[Digest],
    diff_ids: &[Digest],
    large: u64,
) -> Option<(usize, LayerRecord)> {
    let read = |run: Run<'_>| {
        let path = path(store, lower, run, large);
        record::read::<Chain>(&path).unwrap_or_else(|e| {
            tracing::warn!(path = %path.display(), error = %e, "chain record left aside");
            None
        })
    };
    for covered in (1..=diff_ids.len()).rev() {
        let (ids, last) = (&diff_ids[..covered], covered == diff_ids.len());
        let whole = read((ids, None)).filter(|chain| last || chain.unpacked_bytes >= large);
        let ended = || diff_ids.get(covered).and_then(|follows| read((ids, Some(*follows))));
        if let Some(chain) = whole.or_else(ended)
            && let Ok(layer) = store.get(&chain.digest)
        {
            // Before it is looked at: from here on it stays.
            store.note_made(&chain.digest);
            if !store.holds(&chain.digest) {
                continue;
            }
            return Some((covered, layer));
        }
    }
    None
}

/// Records a run.
pub(crate) fn remember(
    store: &LayerStore,
    lower: &[Digest],
    run: Run<'_>,
    large: u64,
    chain: &Chain,
) -> Result<(), crate::error::StoreError> {
    record::write(&path(store, lower, run, large), &store.staging_dir(), chain)
}
