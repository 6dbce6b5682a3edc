//! Imports, builds and snapshots that have begun and are not in the catalogue yet, so that a collection of layers leaves
//! alone what they make.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// When those under way began, by number.
#[derive(Debug, Default)]
pub struct Unsettled(Mutex<Under>);

#[derive(Debug, Default)]
struct Under {
    next: u64,
    /// Unix milliseconds.
    begun: BTreeMap<u64, u64>,
}

/// One of them. It is settled when this is dropped: after its record is in the catalogue, or when it has none.
#[derive(Debug)]
pub struct Making {
    of: Arc<Unsettled>,
    number: u64,
}

impl Unsettled {
    /// Begins with one.
    pub fn begin(self: &Arc<Self>) -> Making {
        let mut under = self.lock();
        let number = under.next;
        under.next += 1;
        under.begun.insert(number, now_ms());
        Making { of: Arc::clone(self), number }
    }

    /// Unix milliseconds since when there may be layers that the catalogue does not name yet. To be asked for before the
    /// catalogue is read.
    pub fn since_ms(&self) -> u64 {
        let under = self.lock();
        under.begun.values().copied().min().unwrap_or(u64::MAX).min(now_ms())
    }

    fn lock(&self) -> MutexGuard<'_, Under> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        self.of.lock().begun.remove(&self.number);
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_is_unsettled_since_the_first_that_goes_on() {
        let unsettled = Arc::new(Unsettled::default());
        let before = now_ms();
        assert!(unsettled.since_ms() >= before);
        let (first, second) = (unsettled.begin(), unsettled.begin());
        let begun = unsettled.since_ms();
        assert!(begun >= before);
        std::thread::sleep(std::time::Duration::from_millis(5));
        drop(second);
        assert_eq!(unsettled.since_ms(), begun);
        drop(first);
        assert!(unsettled.since_ms() > begun);
    }
}
