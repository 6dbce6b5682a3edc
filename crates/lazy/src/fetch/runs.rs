//! Which chunks are fetched together.

use corral_format::CHUNK;
use corral_format::places::Place;

/// A chunk and where it is said to lie.
#[derive(Debug)]
pub(crate) struct Placed<T> {
    /// What it is for the caller.
    pub item: T,
    /// Where it lies.
    pub place: Place,
}

/// Whether a chunk can lie there at all: places come from anybody.
pub(crate) fn is_sound(place: Place) -> bool {
    place.stored > 0 && u64::from(place.stored) <= CHUNK && place.offset.checked_add(place.stored.into()).is_some()
}

/// Groups chunks that lie behind each other in one pack, up to so many bytes.
pub(crate) fn group<T>(mut chunks: Vec<Placed<T>>, most: u64) -> Vec<Vec<Placed<T>>> {
    chunks.sort_by_key(|c| (c.place.pack, c.place.offset));
    let mut runs: Vec<Vec<Placed<T>>> = Vec::new();
    let mut bytes = 0;
    for chunk in chunks {
        let stored = u64::from(chunk.place.stored);
        match runs.last_mut() {
            Some(run) if run.last().is_some_and(|last| follows(last.place, chunk.place)) && bytes + stored <= most => {
                bytes += stored;
                run.push(chunk);
            }
            _ => {
                bytes = stored;
                runs.push(vec![chunk]);
            }
        }
    }
    runs
}

fn follows(one: Place, next: Place) -> bool {
    is_sound(one) && is_sound(next) && one.pack == next.pack && one.offset + u64::from(one.stored) == next.offset
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_fetched_together() {
        let placed = |item: u32, pack, offset, stored| Placed { item, place: Place { pack, offset, stored } };
        let chunks = vec![
            placed(5, 1, 0, 10),
            placed(0, 0, 100, 10),
            placed(2, 0, 120, 10),
            placed(1, 0, 110, 10),
            placed(3, 0, 140, 10),
            placed(4, 0, 150, 200_000),
            placed(6, 1, 10, 10),
        ];
        let runs: Vec<Vec<u32>> = group(chunks, 25).iter().map(|r| r.iter().map(|c| c.item).collect()).collect();
        assert_eq!(runs, [vec![0, 1], vec![2], vec![3], vec![4], vec![5, 6]]);
        assert!(!is_sound(Place { pack: 0, offset: u64::MAX, stored: 1 }));
        assert!(!is_sound(Place { pack: 0, offset: 0, stored: 0 }));
    }
}
