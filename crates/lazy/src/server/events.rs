//! What happened lately, for clients that listen and for those that come back.

use crate::control::{Event, EventRecord};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// Most events that are kept.
const MOST: usize = 2048;

/// The events of this process.
#[derive(Debug)]
pub(crate) struct Events {
    /// Told apart from the events of other processes by this.
    pub epoch: u64,
    kept: Mutex<Kept>,
    newest: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Kept {
    records: VecDeque<EventRecord>,
    next: u64,
}

impl Events {
    pub fn new() -> Self {
        let epoch = getrandom::u64().unwrap_or_else(|_| now_ms());
        // Numbers that every reader of JSON keeps exact.
        let epoch = epoch >> 12;
        Self { epoch, kept: Mutex::new(Kept { next: 1, ..Kept::default() }), newest: watch::Sender::new(0) }
    }

    pub fn push(&self, event: Event) {
        let mut kept = self.kept();
        let seq = kept.next;
        kept.next += 1;
        if kept.records.len() >= MOST {
            kept.records.pop_front();
        }
        kept.records.push_back(EventRecord { seq, at_ms: now_ms(), event });
        drop(kept);
        self.newest.send_replace(seq);
    }

    /// Events after a number, and how many are gone that came between.
    pub fn after(&self, seq: u64) -> (Vec<EventRecord>, u64) {
        let kept = self.kept();
        let first = kept.next - kept.records.len() as u64;
        let lost = first.saturating_sub(seq.saturating_add(1));
        (kept.records.iter().filter(|r| r.seq > seq).cloned().collect(), lost)
    }

    /// The number of the newest one, and its successors.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_counted() {
        let events = Events::new();
        assert_eq!(events.after(0), (vec![], 0));
        let id = "0".repeat(64).parse().unwrap();
        for _ in 0..MOST + 5 {
            events.push(Event::Complete { layer: id });
        }
        let (records, lost) = events.after(2);
        assert_eq!((records.len(), records[0].seq, lost), (MOST, 6, 3));
        assert_eq!(events.after(MOST as u64 + 5), (vec![], 0));
        assert_eq!(events.after(u64::MAX), (vec![], 0));
    }
}
