//! Which stored layer a run of source layers became, so that importing again need not unpack again.
//!
//! A run is known by the stored layers beneath it and the diff ids in it. Where a run ends depends on the image and the
//! threshold alone, never on what the store happens to hold, so that two nodes agree on an image's digest.

use crate::record;
use crate::store::LayerStore;
use corral_api::digest::Digest;
use corral_api::image::LayerRecord;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::PathBuf;

/// Raise when the same source would give another stored layer.
const FORMAT: u32 = 2;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Chain {
    pub(crate) digest: Digest,
    /// What the run's layers unpacked to: whether it was full.
    pub(crate) unpacked_bytes: u64,
}

fn path(store: &LayerStore, lower: &[Digest], diff_ids: &[Digest], run_bytes: u64) -> PathBuf {
    let key = json!({"format": FORMAT, "run_bytes": run_bytes, "lower": lower, "diff_ids": diff_ids});
    store.chains_dir().join(format!("{}.json", record::canonical_digest(&key).hex()))
}

/// The run that begins these diff ids, if its stored layer is there: how many ids it covers, and the layer.
pub(crate) fn find(
    store: &LayerStore,
    lower: &[Digest],
    diff_ids: &[Digest],
    run_bytes: u64,
) -> Option<(usize, LayerRecord)> {
    for covered in (1..=diff_ids.len()).rev() {
        let path = path(store, lower, &diff_ids[..covered], run_bytes);
        match record::read::<Chain>(&path) {
            Ok(Some(chain)) => {
                let ends_here = covered == diff_ids.len() || chain.unpacked_bytes >= run_bytes;
                if ends_here && let Ok(layer) = store.get(&chain.digest) {
                    return Some((covered, layer));
                }
            }
            Ok(None) => {}
            Err(e) => tracing::warn!(path = %path.display(), error = %e, "chain record left aside"),
        }
    }
    None
}

/// Records a run.
pub(crate) fn remember(
    store: &LayerStore,
    lower: &[Digest],
    diff_ids: &[Digest],
    run_bytes: u64,
    chain: &Chain,
) -> Result<(), crate::error::StoreError> {
    record::write(&path(store, lower, diff_ids, run_bytes), &store.staging_dir(), chain)
}
