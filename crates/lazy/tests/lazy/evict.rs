//! Dropping data that can be had again: under readers, and interrupted.

use crate::support::*;
use corral_format::presence;
use corral_lazy::control::Event;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes that a layer's data takes on the disk.
fn taken(layer: &Layer) -> u64 {
    std::fs::metadata(layer.dir.join("data")).unwrap().blocks() * 512
}

/// Looks that the map is not ahead of the data.
fn assert_sound(layer: &Layer) {
    let data = std::fs::read(layer.dir.join("data")).unwrap();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let count = layer.manifest.chunks.len();
    let here = match std::fs::read(layer.dir.join("present")) {
        Ok(bytes) => presence::decode(&bytes, count, &boot).unwrap().chunks,
        Err(_) => vec![true; count],
    };
    for (chunk, here) in layer.manifest.chunks.iter().zip(here) {
        let bytes = &data[chunk.offset as usize..][..chunk.len as usize];
        assert!(!here || *blake3::hash(bytes).as_bytes() == chunk.hash, "a chunk at {} is not here", chunk.offset);
    }
}

#[test]
fn a_layer_that_was_dropped_is_read_right_again_and_old_mounts_read_on() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(20, 41));
        let held = Held::start(&site, |_| {});
        let lazy = Mounted::new(&site, &layer, true);
        lazy.check(&layer);
        let is_complete = |event: &Event| matches!(event, Event::Complete { .. });
        events_until(&held.options.socket, is_complete);
        // From its own data, which no server sees.
        let own = Mounted::new(&site, &layer, false);
        let evict = || client(&held.options.socket, async |link| link.evict(layer.id).await.unwrap());
        assert!(evict() >= 10 << 20);
        assert_eq!(taken(&layer), 0);
        assert_sound(&layer);
        own.check(&layer);
        lazy.check(&layer);
        Mounted::new(&site, &layer, true).check(&layer);
        until("a complete layer", || !layer.dir.join("present").exists());
        assert!(std::fs::read(layer.dir.join("data")).unwrap() == layer.data());
        let unknown = "0".repeat(64).parse().unwrap();
        let refused = client(&held.options.socket, async |link| link.evict(unknown).await.unwrap_err());
        assert!(refused.to_string().contains("is not on this node"), "{refused}");
        drop((own, lazy));
        held.end();
    });
}

#[test]
fn readers_notice_nothing_of_data_that_is_dropped_again_and_again() {
    within(90, || {
        let site = Site::new();
        let layer = Arc::new(site.layer(files(12, 42)));
        let inside = Inside::start(&site, |_| {});
        let stop = Arc::new(AtomicBool::new(false));
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        let mut rounds = 0;
                        while !stop.load(Ordering::Relaxed) {
                            Mounted::new(&site, &layer, true).check(&layer);
                            rounds += 1;
                        }
                        rounds
                    })
                })
                .collect();
            let end = Instant::now() + Duration::from_secs(6);
            let mut dropped = 0;
            while Instant::now() < end {
                // Refused while it is being forced to the disk.
                dropped += usize::from(client(&inside.socket, async |link| link.evict(layer.id).await.is_ok()));
                std::thread::sleep(Duration::from_millis(30));
            }
            stop.store(true, Ordering::Relaxed);
            let rounds: usize = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
            println!("dropped {dropped} times during {rounds} rounds");
            assert!(dropped > 10 && rounds > 2);
        });
        assert_eq!(of(&inside, &layer).reads.errors, 0);
    });
}

#[test]
fn a_server_that_is_killed_while_it_drops_data_leaves_what_is_right() {
    within(90, || {
        let site = Site::new();
        let layer = site.layer(files(6, 43));
        let held = Held::start(&site, |_| {});
        for round in 0..30_u64 {
            Mounted::new(&site, &layer, true).check(&layer);
            let server = held.who().server_pid;
            let socket = held.options.socket.clone();
            let id = layer.id;
            let asking = std::thread::spawn(move || {
                // Told that the connection ended, most often.
                client(&socket, async |link| link.evict(id).await.is_ok())
            });
            std::thread::sleep(Duration::from_micros(150 * round));
            corral_sys::process::kill(server, libc::SIGKILL).unwrap();
            asking.join().unwrap();
            until("the end of the server", || !is_there(server));
            assert_sound(&layer);
        }
        Mounted::new(&site, &layer, true).check(&layer);
        held.end();
    });
}
