//! When a state that lasts is told in the log: as it begins, then now and then, and as it ends.

use std::time::{Duration, Instant};

/// How often a state that goes on is told again.
const EVERY: Duration = Duration::from_secs(300);

/// What was told of one state.
#[derive(Debug, Default)]
pub struct Reminder {
    told: Option<Instant>,
}

impl Reminder {
    /// The state holds; whether to say so.
    pub fn holds(&mut self, now: Instant) -> bool {
        let due = self.told.is_none_or(|told| now.duration_since(told) >= EVERY);
        if due {
            self.told = Some(now);
        }
        due
    }

    /// The state does not hold; whether it did, which is to be said.
    pub fn over(&mut self) -> bool {
        self.told.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_told_as_it_begins_now_and_then_and_as_it_ends() {
        let (mut reminder, begin) = (Reminder::default(), Instant::now());
        assert!(!reminder.over());
        let told: Vec<u64> = (0..700).step_by(2).filter(|s| reminder.holds(begin + Duration::from_secs(*s))).collect();
        assert_eq!(told, [0, 300, 600]);
        assert!(reminder.over() && !reminder.over());
        assert!(reminder.holds(begin + Duration::from_secs(701)), "it begins anew");
    }
}
