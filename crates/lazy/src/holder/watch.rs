//! Noticing a server that stands still: stopped, or with threads that wait for each other.
//!
//! It is asked again and again, and answers as [`crate::server`] says: not a server whose store is slow, but one that
//! does nothing. Silence is counted in questions, not in time, so that a host that stood still itself blames nobody.
//!
//! ```text
//! asked ─ answer ─▶ rest ─ a while ─▶ asked
//!   └ no answer for QUESTIONS whiles ─▶ killed, and started anew as after a crash
//! ```

use std::time::{Duration, Instant};

/// What is asked of a server.
pub(crate) const QUESTION: &[u8] = b"alive";
/// What it answers.
pub(crate) const ANSWER: &[u8] = b"yes";

/// Times that a question may stay without an answer.
const QUESTIONS: u32 = 5;
/// How often patience is doubled when servers are found still one after the other: the host may be that slow.
const MOST_DOUBLED: u32 = 3;

/// Silence of one server after the other.
#[derive(Debug)]
pub(super) struct Watch {
    /// Between looks; none where nobody is watched.
    every: Option<Duration>,
    next: Instant,
    asked: bool,
    silent: u32,
    doubled: u32,
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// Nothing.
    Rest,
    /// Ask the server.
    Ask,
    /// It stands still.
    Still,
}

impl Watch {
    /// Of servers that may be silent for so long; zero is for ever.
    pub fn new(limit: Duration) -> Self {
        let every = (!limit.is_zero()).then(|| (limit / QUESTIONS).max(Duration::from_millis(1)));
        Self { every, next: Instant::now(), asked: false, silent: 0, doubled: 0 }
    }

    /// A server begins.
    pub fn begin(&mut self, now: Instant) {
        (self.next, self.asked, self.silent) = (now, false, 0);
    }

    /// It answered.
    pub fn answered(&mut self) {
        (self.asked, self.silent, self.doubled) = (false, 0, 0);
    }

    /// When to look next.
    pub fn due(&self) -> Option<Instant> {
        self.every.map(|_| self.next)
    }

    /// Looks, where it is time. What the server said must have been heard before.
    pub fn look(&mut self, now: Instant) -> Look {
        let Some(every) = self.every.filter(|_| self.next <= now) else { return Look::Rest };
        self.next = now + every;
        if !self.asked {
            self.asked = true;
            return Look::Ask;
        }
        self.silent += 1;
        if self.silent < QUESTIONS << self.doubled {
            return Look::Rest;
        }
        self.doubled = (self.doubled + 1).min(MOST_DOUBLED);
        Look::Still
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    /// Looks until the server is found still: how many there were.
    fn looks(watch: &mut Watch, mut now: Instant) -> u32 {
        watch.begin(now);
        for count in 0.. {
            if watch.look(now) == Look::Still {
                return count;
            }
            now += Duration::from_secs(1);
        }
        unreachable!()
    }

    #[test]
    fn silence_is_counted_and_patience_grows_until_one_answers() {
        let (mut watch, now) = (Watch::new(LIMIT), Instant::now());
        let counts: Vec<u32> = (0..5).map(|_| looks(&mut watch, now)).collect();
        assert_eq!(counts, [5, 10, 20, 40, 40]);
        watch.answered();
        assert_eq!(looks(&mut watch, now), 5);
    }

    #[test]
    fn who_answers_is_left_alone_and_a_host_that_stood_still_blames_nobody() {
        let (mut watch, mut now) = (Watch::new(LIMIT), Instant::now());
        watch.begin(now);
        for _ in 0..100 {
            assert_eq!(watch.look(now), Look::Ask);
            assert_eq!(watch.look(now), Look::Rest, "not yet");
            watch.answered();
            now += Duration::from_secs(1);
        }
        assert_eq!(watch.look(now), Look::Ask);
        assert_eq!(watch.look(now + Duration::from_secs(3600)), Look::Rest);
    }

    #[test]
    fn nobody_is_watched_where_that_is_asked_for() {
        let mut watch = Watch::new(Duration::ZERO);
        assert_eq!((watch.due(), watch.look(Instant::now())), (None, Look::Rest));
    }
}
