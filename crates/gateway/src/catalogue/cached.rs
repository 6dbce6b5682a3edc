//! A bounded map of answers that writes make stale.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Answers read since the last write. The generation keeps an answer read before a write from being kept after it.
#[derive(Debug)]
pub struct Cached<K, V> {
    limit: usize,
    inner: RwLock<Inner<K, V>>,
}

#[derive(Debug)]
struct Inner<K, V> {
    generation: u64,
    map: HashMap<K, V>,
}

impl<K: Eq + Hash, V: Clone> Cached<K, V> {
    /// An empty map that holds up to `limit` answers.
    pub fn new(limit: usize) -> Self {
        Self { limit, inner: RwLock::new(Inner { generation: 0, map: HashMap::new() }) }
    }

    fn read(&self) -> RwLockReadGuard<'_, Inner<K, V>> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> RwLockWriteGuard<'_, Inner<K, V>> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer, if kept.
    pub fn get<Q: ?Sized + Eq + Hash>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.read().map.get(key).cloned()
    }

    /// Take this before reading what shall be kept.
    pub fn generation(&self) -> u64 {
        self.read().generation
    }

    /// Keeps an answer, unless something was written since `generation`. A full map starts afresh.
    pub fn keep(&self, generation: u64, key: K, value: V) {
        let mut inner = self.lock();
        if inner.generation == generation {
            if inner.map.len() >= self.limit {
                inner.map.clear();
            }
            inner.map.insert(key, value);
        }
    }

    /// Forgets everything.
    pub fn clear(&self) {
        let mut inner = self.lock();
        inner.generation += 1;
        inner.map.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_read_before_a_write_is_not_kept_after_it() {
        let cached = Cached::<String, u32>::new(2);
        let before = cached.generation();
        cached.clear();
        cached.keep(before, "a".into(), 1);
        assert_eq!(cached.get("a"), None);
        let now = cached.generation();
        for (n, key) in ["a", "b", "c"].into_iter().enumerate() {
            cached.keep(now, key.into(), n as u32);
        }
        assert_eq!(cached.get("c"), Some(2));
        assert_eq!(cached.get("a"), None, "the map is bounded");
    }
}
