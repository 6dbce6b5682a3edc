//! A server that is killed every second while whole layers are hashed.

use crate::support::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A layer, and the hashes of its files instead of these.
struct Hashed {
    layer: Layer,
    sums: BTreeMap<String, blake3::Hash>,
}

impl Hashed {
    fn new(mut layer: Layer) -> Self {
        let sums = std::mem::take(&mut layer.files).into_iter().map(|(name, file)| (name, blake3::hash(&file)));
        Self { sums: sums.collect(), layer }
    }

    /// Hashes the whole tree, through a mount of its own.
    fn check(&self, site: &Site) {
        let mounted = Mounted::new(site, &self.layer, true);
        for (name, sum) in &self.sums {
            let mut hasher = blake3::Hasher::new();
            let file = std::fs::File::open(mounted.at.join(name)).unwrap();
            hasher.update_reader(file).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(hasher.finalize(), *sum, "{name}");
        }
    }
}

/// Ends the killing, also where a reader panics.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn setting(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap_or_else(|_| panic!("{name}: {text:?} is no number")))
}

/// `CORRAL_SOAK_LAYERS=20 CORRAL_SOAK_KILLS=60` is the size of a node that works.
#[test]
fn whole_layers_are_hashed_right_while_servers_are_killed_every_second() {
    let (count, mib) = (setting("CORRAL_SOAK_LAYERS", 5), setting("CORRAL_SOAK_MIB", 30));
    let kills = setting("CORRAL_SOAK_KILLS", 8);
    within(60 + 10 * kills + count * mib / 4, move || {
        let site = Site::new();
        let layers: Vec<Hashed> = (0..count).map(|n| Hashed::new(site.layer(files(mib as usize, 900 + n)))).collect();
        let held = Held::start(&site, |_| {});
        let (killed, rounds, stop) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let next = Instant::now() + Duration::from_secs(1);
                    held.kill_server();
                    killed.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(next.saturating_duration_since(Instant::now()));
                }
            });
            let _stop = StopAtEnd(&stop);
            while killed.load(Ordering::Relaxed) < kills || rounds.load(Ordering::Relaxed) == 0 {
                std::thread::scope(|scope| layers.iter().for_each(|layer| drop(scope.spawn(|| layer.check(&site)))));
                rounds.fetch_add(1, Ordering::Relaxed);
                // All is to be fetched again.
                for Hashed { layer, .. } in &layers {
                    until("data that is dropped", || {
                        try_client(&held.options.socket, async |link| link.evict(layer.id).await).is_ok()
                    });
                }
            }
        });
        let restarts = client(&held.options.socket, async |link| link.stats().await.unwrap().restarts);
        println!("{count} layers of {mib} MiB hashed {rounds:?} times, {killed:?} servers killed: {restarts:?}");
        assert!(restarts.crashed >= kills && restarts.still == 0, "{restarts:?}");
        held.end();
    });
}
