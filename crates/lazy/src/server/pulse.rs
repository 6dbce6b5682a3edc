//! Whether this server does its work: asked by the holder, which replaces one that does not answer.
//!
//! A server that waits for its store answers. One does not that is stopped, whose runtime has no thread left, that holds
//! one of its locks for ever, or whose threads are all at one request for [`LONGEST`].

use super::Core;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long all threads may be at one request each: these wait for nothing but the disk of the node.
const LONGEST: Duration = Duration::from_secs(20);

/// Since when each thread that answers the kernel is at its request.
#[derive(Debug)]
pub(crate) struct Pulse {
    begun: Instant,
    /// Milliseconds after the beginning, or [`IDLE`].
    since: Box<[AtomicU64]>,
}

const IDLE: u64 = u64::MAX;

/// Ends the request of a thread when dropped.
pub(crate) struct AtWork<'a>(&'a AtomicU64);

impl Pulse {
    pub fn new(threads: usize) -> Self {
        Self { begun: Instant::now(), since: (0..threads).map(|_| AtomicU64::new(IDLE)).collect() }
    }

    /// A thread begins with a request.
    pub fn at_work(&self, thread: usize) -> AtWork<'_> {
        let since = &self.since[thread];
        since.store(self.begun.elapsed().as_millis() as u64, Ordering::Relaxed);
        AtWork(since)
    }

    /// Whether a thread waits for requests, or began with one lately.
    fn is_beating(&self, now: Duration) -> bool {
        let oldest = now.saturating_sub(LONGEST).as_millis() as u64;
        self.since.iter().any(|since| since.load(Ordering::Relaxed) >= oldest)
    }
}

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.0.store(IDLE, Ordering::Relaxed);
    }
}

impl Core {
    /// Whether this server does its work. Waits for ever where a lock is held for ever.
    pub fn is_well(&self) -> bool {
        // Each is held for moments only.
        drop(self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        self.layers.open().iter().for_each(|layer| drop((layer.streams(), layer.flights.count())));
        drop((self.events.after(u64::MAX), self.cgroups.count()));
        self.pulse.is_beating(self.pulse.begun.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_are_all_at_one_request_for_long_do_not_beat() {
        let pulse = Pulse::new(2);
        let later = pulse.begun.elapsed() + LONGEST + Duration::from_secs(1);
        assert!(pulse.is_beating(later));
        let one = pulse.at_work(0);
        assert!(pulse.is_beating(later), "the other waits for requests");
        let other = pulse.at_work(1);
        assert!(pulse.is_beating(LONGEST), "not for long");
        assert!(!pulse.is_beating(later));
        drop(one);
        assert!(pulse.is_beating(later));
        drop(other);
    }
}
