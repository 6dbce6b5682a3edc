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

/// Chunks that lie next to a chunk in its pack, the nearest first, up to so many stored bytes.
pub(crate) fn beside(places: &[Place], chunk: usize, side: Side, most: u64) -> impl Iterator<Item = usize> {
    let lies = |one: usize, next: usize| matches!((places.get(one), places.get(next)), (Some(one), Some(next)) if follows(*one, *next));
    let next = move |at: usize| match side {
        Side::Before => at.checked_sub(1).filter(|next| lies(*next, at)),
        Side::Behind => Some(at + 1).filter(|next| lies(at, *next)),
    };
    let mut left = most;
    std::iter::successors(next(chunk), move |at| next(*at)).take_while(move |at| {
        let rest = left.checked_sub(places[*at].stored.into());
        left = rest.unwrap_or(0);
        rest.is_some()
    })
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
    fn what_lies_beside_a_chunk() {
        let mut offset = 0;
        let place = |stored: u32| {
            offset += u64::from(stored);
            Place { pack: 0, offset: offset - u64::from(stored), stored }
        };
        let mut places: Vec<Place> = [10, 10, 90, 10, 30, 30, 30, 10].into_iter().map(place).collect();
        let look = |places: &[Place], chunk| -> [Vec<usize>; 2] {
            [(Side::Before, 60), (Side::Behind, 70)].map(|(side, most)| beside(places, chunk, side, most).collect())
        };
        assert_eq!(look(&places, 4), [vec![3], vec![5, 6, 7]], "as much as fits");
        assert_eq!(look(&places, 0), [vec![], vec![1]]);
        assert_eq!(look(&places, 7), [vec![6, 5], vec![]]);
        places[5].pack = 1;
        assert_eq!(look(&places, 4), [vec![3], vec![]], "another pack is elsewhere");
        assert_eq!(look(&places, 99), <[Vec<usize>; 2]>::default());
    }
}
