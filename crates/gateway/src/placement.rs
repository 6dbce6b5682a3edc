//! Which node a new sandbox goes to: those that take it, then the least loaded of a few picked at random.
//!
//! Picking among a few keeps many gateways with slightly old views from all choosing the same node (Mitzenmacher, "The
//! Power of Two Choices in Randomized Load Balancing", 1996). The node has the last word.

/// How many nodes are compared.
pub const CHOICES: usize = 3;

/// What placement knows of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Whether it takes new sandboxes.
    pub accepting: bool,
    /// Sandboxes it has, creates on their way included.
    pub load: u64,
    /// The most it admits.
    pub capacity: u64,
}

impl Candidate {
    fn takes_one_more(&self) -> bool {
        self.accepting && self.load < self.capacity
    }

    /// Load in parts of 1,024 of the capacity.
    fn fill(&self) -> u64 {
        self.load.saturating_mul(1024) / self.capacity.max(1)
    }
}

/// Index of the chosen node. `random(n)` gives a number below `n`. Where no node seems to take one more, any of them is
/// asked: the view may be old, and its refusal is the right answer. `None` only when there are no nodes.
pub fn choose(candidates: &[Candidate], random: &mut dyn FnMut(usize) -> usize) -> Option<usize> {
    let mut open: Vec<usize> = (0..candidates.len()).filter(|&i| candidates[i].takes_one_more()).collect();
    if open.is_empty() {
        open = (0..candidates.len()).collect();
    }
    for picked in 0..open.len().min(CHOICES) {
        let other = picked + random(open.len() - picked);
        open.swap(picked, other);
    }
    open.into_iter().take(CHOICES).min_by_key(|&i| candidates[i].fill())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(accepting: bool, load: u64, capacity: u64) -> Candidate {
        Candidate { accepting, load, capacity }
    }

    #[test]
    fn closed_and_full_nodes_are_passed_over() {
        let nodes = [node(false, 0, 10), node(true, 10, 10), node(true, 9, 10)];
        for seed in 0..10 {
            assert_eq!(choose(&nodes, &mut |n| seed % n), Some(2));
        }
    }

    #[test]
    fn the_least_filled_of_the_picked_wins() {
        let nodes = [node(true, 50, 100), node(true, 10, 100), node(true, 30, 1000)];
        assert_eq!(choose(&nodes, &mut |_| 0), Some(2), "3% full, though it has more than 10 sandboxes");
    }

    #[test]
    fn a_full_cluster_still_gets_an_answer_and_an_empty_one_none() {
        assert_eq!(choose(&[node(false, 0, 0)], &mut |_| 0), Some(0));
        assert_eq!(choose(&[], &mut |_| 0), None);
    }

    #[test]
    fn load_spreads_over_equal_nodes() {
        let mut nodes = [node(true, 0, 1000); 8];
        let mut state = 1u64;
        for _ in 0..4000 {
            let i = choose(&nodes, &mut |n| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as usize % n
            });
            nodes[i.unwrap()].load += 1;
        }
        let (low, high) = (nodes.iter().map(|n| n.load).min(), nodes.iter().map(|n| n.load).max());
        assert!(high.unwrap() - low.unwrap() <= 8, "{low:?} to {high:?}");
    }
}
