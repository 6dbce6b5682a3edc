//! Which cores a sandbox runs on. A sandbox narrower than the host sees, and runs on, only as many cores as its quota
//! rounds up to; which ones follows the load, so that none is stuck beside a busy neighbour for life.

use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::ids::SandboxId;
use corral_api::sandbox::State;
use corral_runtime::cgroup;
use std::collections::HashMap;
use std::sync::Arc;

/// Load of every core, as sandboxes make it.
#[derive(Debug, Default)]
pub struct Balance {
    /// CPU time of each sandbox when it was last looked at.
    seen: HashMap<SandboxId, u64>,
}

/// Whether both cores are better off when what makes `pct` of a core's load `here` goes `there`: by a share of the load,
/// as others than sandboxes may leave them little of a core, and by more than noise.
fn is_worth_moving(here: u64, there: u64, pct: u64) -> bool {
    const NOISE_PCT: u64 = 5;
    here > there + pct + (here / 4).max(NOISE_PCT)
}

impl Core {
    /// Cores for a new sandbox: those with the fewest sandboxes. Empty = all.
    pub fn choose_cores(&self, cpus: f64) -> Vec<u16> {
        let wanted = cpus.ceil().max(1.0) as usize;
        if wanted >= usize::from(self.cores) {
            return Vec::new();
        }
        let mut counts: Vec<(usize, u16)> = (0..self.cores).map(|c| (0, c)).collect();
        for sandbox in self.all() {
            for core in &sandbox.lock().affinity {
                counts[usize::from(*core)].0 += 1;
            }
        }
        pick(counts, wanted)
    }

    /// Moves sandboxes from busy cores to idle ones, one a call at the most for each core.
    pub fn rebalance(&self, balance: &mut Balance, elapsed_ms: u64) {
        let mut loads = vec![0u64; usize::from(self.cores)];
        let mut narrow: Vec<(u64, Arc<Sandbox>)> = Vec::new();
        let mut seen = HashMap::new();
        for sandbox in self.all() {
            if sandbox.state() != State::Running || sandbox.lock().affinity.is_empty() {
                continue;
            }
            let Ok(stats) = self.containers.cgroups().stats(sandbox.id.as_str()) else { continue };
            let used = stats.cpu_ms.saturating_sub(balance.seen.get(&sandbox.id).copied().unwrap_or(stats.cpu_ms));
            seen.insert(sandbox.id.clone(), stats.cpu_ms);
            let pct = used * 100 / elapsed_ms.max(1);
            let affinity = sandbox.lock().affinity.clone();
            for core in &affinity {
                loads[usize::from(*core)] += pct / affinity.len() as u64;
            }
            if pct > 0 {
                narrow.push((pct, sandbox));
            }
        }
        balance.seen = seen;
        narrow.sort_by_key(|(pct, _)| *pct);
        for (pct, sandbox) in narrow {
            let affinity = sandbox.lock().affinity.clone();
            let [from] = affinity.as_slice() else { continue };
            let from = *from;
            let Some(to) = (0..self.cores).min_by_key(|c| loads[usize::from(*c)]) else { continue };
            let (here, there) = (loads[usize::from(from)], loads[usize::from(to)]);
            if is_worth_moving(here, there, pct) {
                self.move_to(&sandbox, to);
                loads[usize::from(from)] -= pct;
                loads[usize::from(to)] += pct;
            }
        }
    }

    fn move_to(&self, sandbox: &Sandbox, core: u16) {
        sandbox.lock().affinity = vec![core];
        let mut set = rustix::thread::CpuSet::new();
        set.set(usize::from(core));
        for thread in cgroup::threads(self.containers.cgroups(), sandbox.id.as_str()) {
            if let Some(pid) = rustix::process::Pid::from_raw(thread) {
                // One that ended meanwhile needs no core.
                rustix::thread::sched_setaffinity(Some(pid), &set).unwrap_or(());
            }
        }
    }
}

fn pick(mut counts: Vec<(usize, u16)>, wanted: usize) -> Vec<u16> {
    counts.sort_unstable();
    let mut cores: Vec<u16> = counts.into_iter().take(wanted).map(|(_, core)| core).collect();
    cores.sort_unstable();
    cores
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_shares_a_core_is_parted_and_stays() {
        assert!(is_worth_moving(100, 0, 50));
        assert!(is_worth_moving(30, 0, 15), "also where others leave little");
        assert!(!is_worth_moving(50, 0, 50), "alone is alone anywhere");
        assert!(!is_worth_moving(4, 0, 2), "noise");
        for (here, there) in (0..=200).flat_map(|h| (0..=200).map(move |t| (h, t))) {
            for pct in (0..=here).filter(|p| is_worth_moving(here, there, *p)) {
                assert!(!is_worth_moving(there + pct, here - pct, pct), "{here} {there} {pct}: to and fro");
            }
        }
    }

    #[test]
    fn the_emptiest_cores_are_picked() {
        assert_eq!(pick(vec![(3, 0), (1, 1), (2, 2), (1, 3)], 2), [1, 3]);
        assert_eq!(pick(vec![(0, 0), (0, 1)], 1), [0]);
    }
}
