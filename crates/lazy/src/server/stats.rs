//! Counters: of layers, and of the cgroups whose processes read.

use crate::control::{CgroupStats, FetchLatency, LayerStats as Told, ReadStats};
use crate::fetch::budget::Lane;
use crate::layer::Layer;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Upper bounds of the buckets of fetch latencies, in microseconds; what is above all falls into one more.
pub(crate) const LATENCY_BOUNDS_US: [u64; 14] = [
    250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 5_000_000, 20_000_000,
];

/// What was read and fetched, of one layer or of all.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    read_bytes: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    errors: AtomicU64,
    stored_bytes: AtomicU64,
    raw_bytes: AtomicU64,
    ahead_bytes: AtomicU64,
    trace_bytes: AtomicU64,
    wrong_answers: AtomicU64,
    latencies: [AtomicU64; LATENCY_BOUNDS_US.len() + 1],
    latency_us: AtomicU64,
}

/// Counters of one layer, since it was opened by this process, and with them those of all.
#[derive(Debug, Default)]
pub(crate) struct LayerStats {
    own: Tally,
    all: Arc<Tally>,
}

fn add(to: &AtomicU64, count: u64) {
    to.fetch_add(count, Ordering::Relaxed);
}

fn of(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Tally {
    fn fetched(&self, stored: u64, raw: u64, us: u64, lane: Lane) {
        add(&self.stored_bytes, stored);
        add(&self.raw_bytes, raw);
        match lane {
            Lane::Demand => {}
            Lane::Ahead => add(&self.ahead_bytes, stored),
            Lane::Trace => add(&self.trace_bytes, stored),
        }
        add(&self.latencies[LATENCY_BOUNDS_US.partition_point(|bound| *bound < us)], 1);
        add(&self.latency_us, us);
    }

    /// As a client sees them.
    pub fn tell(&self) -> ReadStats {
        ReadStats {
            read_bytes: of(&self.read_bytes),
            hits: of(&self.hits),
            misses: of(&self.misses),
            errors: of(&self.errors),
            fetched_stored_bytes: of(&self.stored_bytes),
            fetched_raw_bytes: of(&self.raw_bytes),
            ahead_stored_bytes: of(&self.ahead_bytes),
            trace_stored_bytes: of(&self.trace_bytes),
            wrong_answers: of(&self.wrong_answers),
            fetch_latency: FetchLatency {
                bounds_us: LATENCY_BOUNDS_US.to_vec(),
                counts: self.latencies.iter().map(of).collect(),
                sum_us: of(&self.latency_us),
            },
        }
    }
}

impl LayerStats {
    /// Of a layer whose counts are also counted with those of all.
    pub fn within(all: &Arc<Tally>) -> Self {
        Self { own: Tally::default(), all: Arc::clone(all) }
    }

    fn both(&self) -> [&Tally; 2] {
        [&self.own, &self.all]
    }

    pub fn hit(&self, bytes: u64) {
        for tally in self.both() {
            add(&tally.hits, 1);
            add(&tally.read_bytes, bytes);
        }
    }

    pub fn miss(&self, bytes: u64) {
        for tally in self.both() {
            add(&tally.misses, 1);
            add(&tally.read_bytes, bytes);
        }
    }

    pub fn error(&self) {
        self.both().iter().for_each(|tally| add(&tally.errors, 1));
    }

    pub fn wrong_answer(&self) {
        self.both().iter().for_each(|tally| add(&tally.wrong_answers, 1));
    }

    pub fn fetched(&self, stored: u64, raw: u64, took: Duration, lane: Lane) {
        let us = took.as_micros() as u64;
        self.both().iter().for_each(|tally| tally.fetched(stored, raw, us, lane));
    }

    /// As a client sees them.
    pub fn tell(&self, layer: &Layer) -> Told {
        Told {
            layer: layer.id,
            chunks_present: layer.map.present() as u64,
            chunks_touched: layer.touched.count(),
            chunks_total: layer.manifest.chunks.len() as u64,
            complete: layer.map.is_complete(),
            in_flight: layer.flights.count() as u64,
            reads: self.own.tell(),
        }
    }
}

/// How long the cgroup of a thread is believed: threads rarely move, but numbers are used again.
const BELIEVED: Duration = Duration::from_secs(1);
/// Most cgroups that are counted; those that read longest ago are dropped.
const MOST_CGROUPS: usize = 4096;
const MOST_THREADS: usize = 4096;

/// Who reads, and what was read and fetched for them.
#[derive(Debug, Default)]
pub(crate) struct Cgroups(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    of_thread: HashMap<u32, (Instant, Option<Arc<str>>)>,
    charged: HashMap<Arc<str>, Charge>,
}

#[derive(Debug)]
struct Charge {
    read: u64,
    stored: u64,
    raw: u64,
    last: Instant,
}

impl Cgroups {
    /// The v2 cgroup of a thread, as the kernel writes it.
    pub fn of(&self, pid: u32) -> Option<Arc<str>> {
        if pid == 0 {
            return None;
        }
        if let Some((at, cgroup)) = self.known().of_thread.get(&pid)
            && at.elapsed() < BELIEVED
        {
            return cgroup.clone();
        }
        let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let cgroup = text.lines().find_map(|line| line.strip_prefix("0::")).map(Arc::from);
        let mut known = self.known();
        if known.of_thread.len() >= MOST_THREADS {
            known.of_thread.retain(|_, (at, _)| at.elapsed() < BELIEVED);
        }
        if known.of_thread.len() < MOST_THREADS {
            known.of_thread.insert(pid, (Instant::now(), cgroup.clone()));
        }
        cgroup
    }

    /// Counts what the processes of a cgroup asked for.
    pub fn read(&self, cgroup: &Arc<str>, bytes: u64) {
        self.charge(cgroup, |charge| charge.read += bytes);
    }

    /// Counts what was fetched for them.
    pub fn fetched(&self, cgroup: &Arc<str>, stored: u64, raw: u64) {
        self.charge(cgroup, |charge| {
            charge.stored += stored;
            charge.raw += raw;
        });
    }

    fn charge(&self, cgroup: &Arc<str>, count: impl FnOnce(&mut Charge)) {
        let mut known = self.known();
        if known.charged.len() >= MOST_CGROUPS && !known.charged.contains_key(cgroup) {
            let oldest = known.charged.iter().min_by_key(|(_, c)| c.last).map(|(name, _)| Arc::clone(name));
            oldest.and_then(|name| known.charged.remove(&name));
        }
        let fresh = Charge { read: 0, stored: 0, raw: 0, last: Instant::now() };
        let charge = known.charged.entry(Arc::clone(cgroup)).or_insert(fresh);
        count(charge);
        charge.last = Instant::now();
    }

    /// How many are counted.
    pub fn count(&self) -> usize {
        self.known().charged.len()
    }

    /// As a client sees them.
    pub fn tell(&self) -> Vec<CgroupStats> {
        let known = self.known();
        let tell = |(name, charge): (&Arc<str>, &Charge)| CgroupStats {
            cgroup: name.to_string(),
            read_bytes: charge.read,
            fetched_stored_bytes: charge.stored,
            fetched_raw_bytes: charge.raw,
        };
        let mut all: Vec<CgroupStats> = known.charged.iter().map(tell).collect();
        all.sort_by(|a, b| a.cgroup.cmp(&b.cgroup));
        all
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
