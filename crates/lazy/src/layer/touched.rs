//! Which chunks of a layer were read: how many at all, and which first, in order, since somebody began to ask.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Which chunks were read, since this process opened the layer.
#[derive(Debug)]
pub(crate) struct Touched(Box<[AtomicU64]>);

impl Touched {
    /// Of a layer of so many chunks.
    pub fn new(chunks: usize) -> Self {
        Self((0..chunks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    /// Takes note of a read.
    pub fn note(&self, chunks: Range<usize>) {
        for chunk in chunks {
            let (word, bit) = (&self.0[chunk / 64], 1 << (chunk % 64));
            // Most are known: a look costs less than a change.
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }
}

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
    fn each_chunk_counts_once() {
        let touched = Touched::new(130);
        for read in [0..1, 0..3, 60..70, 129..130, 5..5] {
            touched.note(read);
        }
        assert_eq!(touched.count(), 14);
        assert_eq!(Touched::new(0).count(), 0);
    }

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
