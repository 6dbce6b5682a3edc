//! How much may be under way: calls and bytes, a share for each lane.
//!
//! Shares are not lent: what nobody waits for never holds up what somebody does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// What goes before what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Somebody waits.
    Demand,
    /// Somebody will, soon.
    Ahead,
    /// Somebody may.
    Trace,
}

/// Limits of all lanes together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of answers and of chunks being unpacked.
    pub bytes: u64,
    /// Bytes of one read of a pack.
    pub run_bytes: u64,
    /// Calls for readers; half as many for what comes ahead, a quarter for traces.
    pub calls: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: 256 << 20, run_bytes: 4 << 20, calls: 32 }
    }
}

#[derive(Debug)]
struct Share {
    calls: Arc<Semaphore>,
    kib: Arc<Semaphore>,
    total_kib: u32,
    run_bytes: u64,
}

/// The budget.
#[derive(Debug)]
pub(crate) struct Budget {
    shares: [Share; 3],
    used: Arc<Gauge>,
}

/// Bytes under way, and the most there were.
#[derive(Debug, Default)]
struct Gauge {
    now: AtomicU64,
    peak: AtomicU64,
}

/// Leave for one read; ends when dropped.
#[derive(Debug)]
pub(crate) struct Leave {
    _call: Option<OwnedSemaphorePermit>,
    _kib: Option<OwnedSemaphorePermit>,
    gauge: Arc<Gauge>,
    bytes: u64,
}

impl Budget {
    pub fn new(limits: Limits) -> Self {
        let share = |parts: u64, calls: u32, run: u64| {
            // Below this not even one chunk fits.
            let bytes = (limits.bytes / 4 * parts).max(1 << 20);
            Share {
                calls: Arc::new(Semaphore::new(calls.max(1) as usize)),
                kib: Arc::new(Semaphore::new((bytes >> 10) as usize)),
                total_kib: (bytes >> 10).min(u32::MAX.into()) as u32,
                run_bytes: run.min(bytes / 2).max(256 << 10),
            }
        };
        let run = limits.run_bytes;
        let shares =
            [share(2, limits.calls, run), share(1, limits.calls / 2, run / 2), share(1, limits.calls / 4, run / 4)];
        Self { shares, used: Arc::default() }
    }

    /// Most bytes of one read in a lane.
    pub fn run_bytes(&self, lane: Lane) -> u64 {
        self.share(lane).run_bytes
    }

    /// Waits for leave to have so many bytes in memory.
    pub async fn take(&self, lane: Lane, bytes: u64) -> Leave {
        let share = self.share(lane);
        // The semaphores are never closed.
        let call = Arc::clone(&share.calls).acquire_owned().await.ok();
        let kib = (bytes.div_ceil(1024)).min(share.total_kib.into()) as u32;
        let kib = Arc::clone(&share.kib).acquire_many_owned(kib).await.ok();
        let now = self.used.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.used.peak.fetch_max(now, Ordering::Relaxed);
        Leave { _call: call, _kib: kib, gauge: Arc::clone(&self.used), bytes }
    }

    /// Bytes under way now, and at most so far.
    pub fn used(&self) -> (u64, u64) {
        (self.used.now.load(Ordering::Relaxed), self.used.peak.load(Ordering::Relaxed))
    }

    fn share(&self, lane: Lane) -> &Share {
        &self.shares[match lane {
            Lane::Demand => 0,
            Lane::Ahead => 1,
            Lane::Trace => 2,
        }]
    }
}

impl Drop for Leave {
    fn drop(&mut self) {
        self.gauge.now.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
