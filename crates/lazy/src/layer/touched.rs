//! Which chunks of a layer were read first, in order, since somebody began to ask.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// All that is being recorded of one layer.
#[derive(Debug, Default)]
pub(crate) struct Recorders {
    any: AtomicBool,
    list: Mutex<Vec<Recorder>>,
}

#[derive(Debug)]
struct Recorder {
    class: String,
    seen: Vec<u64>,
    order: Vec<u32>,
    most: usize,
    full: Arc<Notify>,
}

impl Recorders {
    /// Begins to record for a class, of a layer of so many chunks. Nothing where that is under way; otherwise what tells
    /// when `most` were seen.
    pub fn begin(&self, class: &str, chunks: usize, most: usize) -> Option<Arc<Notify>> {
        let mut list = self.list();
        if list.iter().any(|r| r.class == class) {
            return None;
        }
        let full = Arc::<Notify>::default();
        let most = most.min(chunks);
        let seen = vec![0; chunks.div_ceil(64)];
        list.push(Recorder { class: class.to_owned(), seen, order: Vec::new(), most, full: Arc::clone(&full) });
        self.any.store(true, Ordering::Release);
        Some(full)
    }

    /// Takes note of a read.
    pub fn touch(&self, chunks: &Range<usize>) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        for recorder in self.list().iter_mut() {
            for chunk in chunks.clone() {
                recorder.touch(chunk);
            }
        }
    }

    /// Ends the recording for a class: what was read, in order.
    pub fn end(&self, class: &str) -> Vec<u32> {
        let mut list = self.list();
        let found = list.iter().position(|r| r.class == class).map(|at| list.swap_remove(at).order);
        self.any.store(!list.is_empty(), Ordering::Release);
        found.unwrap_or_default()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Recorder>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recorder {
    fn touch(&mut self, chunk: usize) {
        let (word, bit) = (chunk / 64, 1 << (chunk % 64));
        if self.order.len() >= self.most || self.seen[word] & bit != 0 {
            return;
        }
        self.seen[word] |= bit;
        self.order.push(chunk as u32);
        if self.order.len() == self.most {
            self.full.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_touches_are_kept_in_order() {
        let recorders = Recorders::default();
        recorders.touch(&(0..9));
        assert!(recorders.begin("a", 100, 4).is_some());
        assert!(recorders.begin("a", 100, 4).is_none());
        for read in [70..71, 3..5, 70..71, 3..4, 99..100, 1..2] {
            recorders.touch(&read);
        }
        assert_eq!(recorders.end("a"), [70, 3, 4, 99]);
        assert_eq!(recorders.end("a"), [0_u32; 0]);
    }
}
