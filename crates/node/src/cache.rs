//! Keeps the data of layers that the shared store has as well within a limit.
//!
//! Every few seconds what is here is added up. Above the limit the data of layers that no live sandbox has is given up,
//! that which was used longest ago first, a whole layer at a time, until the rest fits. Data that a sandbox has is never
//! touched: where that alone is above the limit, it is told and nothing else happens. Nor is data given up that the
//! store does not say it has.

use crate::lazy::Lazy;
use crate::node::Core;
use crate::reminder::Reminder;
use corral_api::digest::Digest;
use corral_layers::{Cached, SharedError, SharedLayers, StoreError};
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Between rounds.
const EVERY: Duration = Duration::from_secs(3);
/// Rounds between notes of which layers are in use: the precision of when each was last used.
const NOTE_ROUNDS: u32 = 20;
/// The default limit is the disk's size by this.
const SHARE: u64 = 2;

/// How full the cache is, and what was done about it.
#[derive(Debug, Default)]
pub struct CacheState {
    /// The limit; 0 where nothing is cached.
    pub limit_bytes: AtomicU64,
    /// Bytes at the last look.
    pub bytes: AtomicU64,
    /// Layers whose data was given up.
    pub evictions: AtomicU64,
    /// Bytes that was.
    pub evicted_bytes: AtomicU64,
}

impl CacheState {
    /// One with a limit, or with half of the disk that a directory is on.
    pub fn new(limit_bytes: Option<u64>, dir: &Path) -> Self {
        let disk = || rustix::fs::statvfs(dir).map_or(u64::MAX, |s| s.f_blocks.saturating_mul(s.f_frsize));
        Self { limit_bytes: limit_bytes.unwrap_or_else(|| disk() / SHARE).into(), ..Self::default() }
    }
}

/// What a round found.
enum Round {
    /// All is well.
    Within,
    /// So many bytes are too many, and are in use or cannot be given up.
    Over(u64),
}

impl Core {
    /// Runs until the node ends.
    pub async fn keep_cache(self: Arc<Self>, lazy: Arc<Lazy>, shared: SharedLayers) {
        let (mut ticks, mut over) = (tokio::time::interval(EVERY), Reminder::default());
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        for round in 0_u32.. {
            ticks.tick().await;
            match self.cache_round(&lazy, &shared, round % NOTE_ROUNDS == 0).await {
                Ok(Round::Within) if over.over() => tracing::info!("the cache of layers is within its limit again"),
                Ok(Round::Within) => {}
                Ok(Round::Over(bytes)) if over.holds(Instant::now()) => {
                    let why = "what is left is in use, or the store does not say that it has it";
                    tracing::warn!(bytes, why, "the cache of layers is above its limit");
                }
                Ok(Round::Over(_)) => {}
                Err(error) => {
                    tracing::error!(error = %crate::error::chain(&error), "the cache of layers cannot be looked at");
                }
            }
        }
    }

    /// Layers of live sandboxes.
    pub fn used_layers(&self) -> HashSet<Digest> {
        self.all().iter().flat_map(|sandbox| sandbox.lock().record.environment.layers.clone()).collect()
    }

    async fn cache_round(
        self: &Arc<Self>,
        lazy: &Arc<Lazy>,
        shared: &SharedLayers,
        note: bool,
    ) -> Result<Round, StoreError> {
        let this = self.clone();
        let looked = tokio::task::spawn_blocking(move || {
            let used = this.used_layers();
            if note {
                this.layers.note_use(&used);
            }
            this.layers.cached().map(|cached| (cached, used))
        });
        // It only fails when the node ends.
        let Ok(looked) = looked.await else { return Ok(Round::Within) };
        let (cached, used) = looked?;
        let limit = self.cache.limit_bytes.load(Ordering::Relaxed);
        let mut bytes: u64 = cached.iter().map(|layer| layer.bytes).sum();
        for layer in oldest_unused(cached, &used) {
            if bytes <= limit {
                break;
            }
            match self.give_up(lazy, shared, layer).await {
                Ok(true) => bytes = bytes.saturating_sub(layer.bytes),
                Ok(false) => {}
                Err(error) => {
                    // Nor will it answer for the next one.
                    tracing::debug!(error = %crate::error::chain(&error), "the shared store does not answer: data stays");
                    break;
                }
            }
        }
        self.cache.bytes.store(bytes, Ordering::Relaxed);
        Ok(if bytes > limit { Round::Over(bytes - limit) } else { Round::Within })
    }

    /// Gives up a layer's data; whether that was done.
    ///
    /// # Errors
    /// The store does not say whether it has the layer.
    async fn give_up(
        self: &Arc<Self>,
        lazy: &Arc<Lazy>,
        shared: &SharedLayers,
        layer: Cached,
    ) -> Result<bool, SharedError> {
        let digest = layer.digest;
        if !shared.is_published(&digest).await? {
            tracing::debug!(%digest, "the shared store does not have it: its data stays");
            return Ok(false);
        }
        let (this, lazy, runtime) = (self.clone(), lazy.clone(), tokio::runtime::Handle::current());
        let done = tokio::task::spawn_blocking(move || {
            let in_use = |digest: &Digest| this.used_layers().contains(digest);
            this.layers.give_up(&digest, &in_use, || runtime.block_on(lazy.evict(&digest)))
        });
        match done.await {
            Ok(Ok(Some(Ok(freed)))) => {
                self.cache.evictions.fetch_add(1, Ordering::Relaxed);
                self.cache.evicted_bytes.fetch_add(freed, Ordering::Relaxed);
                tracing::info!(%digest, bytes = freed, "data of a layer was given up");
                return Ok(true);
            }
            Ok(Ok(Some(Err(error)))) => {
                tracing::warn!(%digest, error = %crate::error::chain(&error), "data of a layer cannot be given up");
            }
            Ok(Err(error)) => {
                tracing::warn!(%digest, error = %crate::error::chain(&error), "a layer cannot be unmounted");
            }
            // A sandbox has it by now; or the node ends.
            Ok(Ok(None)) | Err(_) => {}
        }
        Ok(false)
    }
}

/// Layers that nobody uses and that have data, that which was used longest ago first.
fn oldest_unused(cached: Vec<Cached>, used: &HashSet<Digest>) -> Vec<Cached> {
    let mut unused: Vec<Cached> =
        cached.into_iter().filter(|layer| layer.bytes > 0 && !used.contains(&layer.digest)).collect();
    unused.sort_by_key(|layer| (layer.used, layer.digest));
    unused
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn what_was_used_longest_ago_goes_first_and_what_is_in_use_never() {
        let layer = |name: u8, bytes: u64, age: u64| Cached {
            digest: Digest::of(&[name]),
            bytes,
            used: SystemTime::UNIX_EPOCH + Duration::from_secs(1000 - age),
        };
        let (newest, oldest, used, empty) = (layer(1, 10, 1), layer(2, 20, 9), layer(3, 30, 99), layer(4, 0, 50));
        let found = oldest_unused(vec![newest, oldest, used, empty], &HashSet::from([used.digest]));
        assert_eq!(found, [oldest, newest]);
    }

    #[test]
    fn the_limit_is_half_of_the_disk_where_none_is_set() {
        let of = |limit| CacheState::new(limit, Path::new("/")).limit_bytes.load(Ordering::Relaxed);
        assert_eq!(of(Some(7)), 7);
        let disk = rustix::fs::statvfs("/").unwrap();
        assert_eq!(of(None), disk.f_blocks * disk.f_frsize / SHARE);
    }
}
