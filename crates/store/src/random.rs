//! Numbers for jitter, names and faults: small, seedable, not for secrets.

use std::hash::{BuildHasher, RandomState};

/// SplitMix64 (Steele, Lea, Flood 2014): one addition and two mixes for each number.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    /// The same seed gives the same numbers.
    pub(crate) fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    /// Seeded by the system, as hash maps are.
    pub(crate) fn fresh() -> Self {
        Self(RandomState::new().hash_one(std::process::id()))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// At least 0, less than 1.
    pub(crate) fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Less than `end`, which is not zero.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}
