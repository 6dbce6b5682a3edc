//! When things were last made or referred to here, so that a gc beside that leaves them alone.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Times by name. By the clock of the host, since who asks may be another process.
#[derive(Debug)]
pub(crate) struct Recent<K>(Mutex<HashMap<K, SystemTime>>);

impl<K> Default for Recent<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Hash + Eq> Recent<K> {
    /// Notes that these are made or referred to now.
    pub(crate) fn note(&self, keys: impl IntoIterator<Item = K>) {
        let now = SystemTime::now();
        self.lock().extend(keys.into_iter().map(|key| (key, now)));
    }

    /// Whether something was noted at that time or later.
    pub(crate) fn since(&self, key: &K, time: SystemTime) -> bool {
        self.lock().get(key).is_some_and(|at| *at >= time)
    }

    /// Forgets what was noted before: nobody asks for that any more.
    pub(crate) fn forget_before(&self, time: SystemTime) {
        self.lock().retain(|_, at| *at >= time);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, SystemTime>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_was_noted_is_recent_until_it_is_forgotten() {
        let recent = Recent::default();
        let before = SystemTime::now();
        recent.note([1, 2]);
        let after = SystemTime::now() + Duration::from_secs(1);
        assert!(recent.since(&1, before) && !recent.since(&1, after) && !recent.since(&3, before));
        recent.forget_before(before);
        assert!(recent.since(&2, before));
        recent.forget_before(after);
        assert!(!recent.since(&2, before));
    }
}
