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

/// Where to look from a chunk.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Side {
    Before,
    Behind,
}

/// Small chunks that lie next to a small one in its pack, the nearest first: one read brings a directory of small files,
/// not one of them. Up to so many stored bytes.
pub(crate) fn beside(places: &[Place], chunk: usize, side: Side, most: u64) -> impl Iterator<Item = usize> {
    let is_small = move |at: usize| places.get(at).is_some_and(|place| u64::from(place.stored) <= most / 2);
    let next = move |at: usize| match side {
        Side::Before => at.checked_sub(1).filter(|next| is_small(*next) && follows(places[*next], places[at])),
        Side::Behind => Some(at + 1).filter(|next| is_small(*next) && follows(places[at], places[*next])),
    };
    let mut left = most;
    std::iter::successors(Some(chunk).filter(|chunk| is_small(*chunk)), move |at| next(*at)).skip(1).take_while(
        move |at| {
            let rest = left.checked_sub(places[*at].stored.into());
            left = rest.unwrap_or(0);
            rest.is_some()
        },
    )
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

    #[test]
    fn small_chunks_lie_beside_small_ones() {
        let mut offset = 0;
        let place = |stored: u32| {
            offset += u64::from(stored);
            Place { pack: 0, offset: offset - u64::from(stored), stored }
        };
        let mut places: Vec<Place> = [10, 10, 90, 10, 30, 30, 30, 10].into_iter().map(place).collect();
        let look = |places: &[Place], chunk| -> [Vec<usize>; 2] {
            [Side::Before, Side::Behind].map(|side| beside(places, chunk, side, 60).collect())
        };
        assert_eq!(look(&places, 4), [vec![3], vec![5, 6]], "up to a large one, and to what fits");
        assert_eq!(look(&places, 0), [vec![], vec![1]]);
        assert_eq!(look(&places, 7), [vec![6, 5], vec![]]);
        let none: [Vec<usize>; 2] = Default::default();
        assert_eq!(look(&places, 2), none, "a large one has none");
        assert_eq!(look(&places, 99), none);
        places[5].pack = 1;
        assert_eq!(look(&places, 4), [vec![3], vec![]], "another pack is elsewhere");
    }
}
