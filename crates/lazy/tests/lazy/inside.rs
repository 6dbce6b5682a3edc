//! The server in this process, before a store that goes wrong as it is told.

use crate::support::*;
use corral_format::CHUNK;
use corral_lazy::control::Event;
use corral_store::{ErrorKind, Fault};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

fn one(name: &str, len: usize) -> Files {
    BTreeMap::from([(name.to_owned(), noise(len, 9))])
}

#[test]
fn one_chunk_is_fetched_once_for_many_readers() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(4, 1));
        let inside = Inside::start(&site, only_what_is_read);
        inside.faults.set_latency(Duration::from_millis(200));
        let barrier = Barrier::new(50);
        let want = layer.data()[..4096].to_vec();
        std::thread::scope(|scope| {
            for _ in 0..50 {
                scope.spawn(|| {
                    let file = inside.file(&layer);
                    // Past the page cache, so that each asks the server.
                    rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::DIRECT).unwrap();
                    barrier.wait();
                    assert!(read_direct(&file, 0, 4096).unwrap() == want);
                });
            }
        });
        assert_eq!(inside.faults.counts().gets, 1);
        let stats = of(&inside, &layer);
        assert_eq!((stats.reads.misses, stats.reads.hits, stats.reads.errors, stats.chunks_present), (50, 0, 0, 1));
        assert_eq!(stats.reads.fetch_latency.counts.iter().sum::<u64>(), 1);
        assert!(stats.reads.fetch_latency.sum_us >= 200_000);
        let cgroups = inside.stats().cgroups;
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap();
        let own = own.lines().find_map(|l| l.strip_prefix("0::")).unwrap();
        assert_eq!((cgroups.len(), cgroups[0].cgroup.as_str()), (1, own));
        assert_eq!(cgroups[0].fetched_stored_bytes, stats.reads.fetched_stored_bytes);
    });
}

#[test]
fn what_is_read_is_counted_by_layer_by_cgroup_and_together() {
    within(60, || {
        let site = Site::new();
        let (one, two) = (site.layer(files(4, 71)), site.layer(files(4, 72)));
        let inside = Inside::start(&site, only_what_is_read);
        for layer in [&one, &two] {
            let file = inside.file(layer);
            rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::DIRECT).unwrap();
            // Twice in the first chunk, and once in two others.
            for offset in [0, 4096, 3 * CHUNK, 9 * CHUNK] {
                read_direct(&file, offset, 4096).unwrap();
            }
        }
        let stats = of(&inside, &one);
        assert_eq!((stats.chunks_touched, stats.chunks_present), (3, 3));
        assert_eq!((stats.reads.read_bytes, stats.reads.hits, stats.reads.misses), (4 * 4096, 1, 3));
        assert_eq!(inside.stats().cgroups[0].read_bytes, 8 * 4096);
        // A layer that nobody has open any more still counts.
        client(&inside.socket, async |link| link.forget(one.id).await.unwrap());
        until("a layer that is forgotten", || inside.stats().layers.iter().all(|l| l.layer != one.id));
        let total = inside.stats().total;
        assert_eq!((total.read_bytes, total.hits, total.misses), (8 * 4096, 2, 6));
        assert_eq!(total.fetch_latency.counts.iter().sum::<u64>(), 6);
    });
}

#[test]
fn what_lies_around_a_chunk_comes_with_it() {
    within(60, || {
        let site = Site::new();
        // Of noise, which does not get smaller: 128 KiB behind and 64 KiB before are so many.
        let layer = site.layer((0..40).map(|n| (format!("f{n:02}"), noise(16 << 10, n))).collect());
        let inside = Inside::start(&site, |config| config.ahead_bytes = 0);
        let mounted = Mounted::new(&site, &layer, true);
        let gets = || inside.faults.counts().gets;
        let read = |number: u32| {
            let name = format!("f{number:02}");
            assert!(mounted.read(&name).unwrap() == layer.files[&name]);
        };
        // The reader does not wait for the others.
        let until_here = |count: u64| until("what lies around", || of(&inside, &layer).chunks_present == count);
        read(10);
        let asked = gets();
        until_here(4 + 1 + 8);
        (6..=18).for_each(read);
        assert_eq!(gets(), asked, "all of these are here");
        read(20);
        until_here(13 + 1 + 1 + 8);
        assert_eq!((gets(), of(&inside, &layer).reads.misses), (asked + 1, 2), "up to what is here");
        mounted.check(&layer);
        assert_eq!(of(&inside, &layer).reads.fetched_raw_bytes, 40 * (16 << 10), "nothing twice");
    });
}

#[test]
fn neighbours_come_together_and_forward_readers_are_preceded() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(one("f", 30 << 20));
        let inside = Inside::start(&site, |_| {});
        inside.faults.set_latency(Duration::from_millis(10));
        let begin = Instant::now();
        Mounted::new(&site, &layer, true).check(&layer);
        let (took, gets) = (begin.elapsed(), inside.faults.counts().gets);
        println!("30 MiB at 10 ms a call: {took:?}, {gets} calls for {} chunks", layer.manifest.chunks.len());
        assert!(gets < 80, "{gets}");
        let stats = of(&inside, &layer);
        assert!(stats.reads.ahead_stored_bytes > stats.reads.fetched_stored_bytes / 2);
        assert_eq!(stats.reads.fetched_raw_bytes, 30 << 20, "nothing twice");
    });
}

#[test]
fn while_the_store_is_down_what_is_here_is_read_and_the_rest_waits() {
    within(60, || {
        let site = Site::new();
        let layer = Arc::new(site.layer(files(20, 2)));
        let inside = Inside::start(&site, only_what_is_read);
        let mounted = Mounted::new(&site, &layer, true);
        assert!(mounted.read("f000").unwrap() == layer.files["f000"]);
        inside.faults.set_down(true);
        let at = mounted.at.clone();
        let waiting: Vec<_> = ["f001", "f004", "f007", "f008"]
            .map(|name| {
                let (at, want) = (at.join(name), layer.files[name].clone());
                std::thread::spawn(move || assert!(std::fs::read(at).unwrap() == want))
            })
            .into_iter()
            .collect();
        until("readers that wait", || inside.stats().waiting_reads >= 4);
        // Another mount has nothing in memory: it asks the server.
        assert!(Mounted::new(&site, &layer, true).read("f000").unwrap() == layer.files["f000"]);
        assert!(waiting.iter().all(|t| !t.is_finished()));
        inside.faults.set_down(false);
        waiting.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(of(&inside, &layer).reads.errors, 0);
        drop(mounted);
    });
}

#[test]
fn a_store_that_stays_down_fails_reads_in_time_and_says_why() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(8, 3));
        let inside = Inside::start(&site, |config| config.wait_limit = Duration::from_secs(2));
        let mounted = Mounted::new(&site, &layer, true);
        inside.faults.set_down(true);
        let begin = Instant::now();
        let error = mounted.read("f001").unwrap_err();
        let took = begin.elapsed();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        assert!(took > Duration::from_millis(1900) && took < Duration::from_secs(4), "{took:?}");
        let seen = events_until(&inside.socket, |event| matches!(event, Event::ReadFailed { .. }));
        let Event::ReadFailed { layer: id, chunk, pid, cgroup, reason } = &seen.last().unwrap().event else { panic!() };
        assert_eq!((*id, *chunk as usize), (layer.id, layer.chunk_of("f001")));
        assert!(*pid > 0 && cgroup.is_some());
        assert!(reason.contains("did not come in time") && reason.contains("injected"), "{reason}");
        inside.faults.set_down(false);
        // The kernel asks again for what failed; for a moment this reader would be told the same.
        until("a store that is back", || mounted.read("f001").is_ok_and(|read| read == layer.files["f001"]));
    });
}

#[test]
fn a_reader_that_is_killed_does_not_wait_for_the_store() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(2, 3));
        let inside = Inside::start(&site, |_| {});
        inside.faults.set_down(true);
        let path = site.root().join("lazy").join(layer.id.hex());
        // Directly: then the reader itself waits for the answer, and the kernel tells when it does not any more.
        let mut command = std::process::Command::new("dd");
        command.arg(format!("if={}", path.display())).args(["of=/dev/null", "bs=4096", "count=1", "iflag=direct"]);
        let mut reader = command.stderr(std::process::Stdio::null()).spawn().unwrap();
        until("a reader that waits", || inside.stats().waiting_reads > 0);
        reader.kill().unwrap();
        let begin = Instant::now();
        reader.wait().unwrap();
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        until("nobody waits", || inside.stats().waiting_reads == 0);
        inside.faults.set_down(false);
    });
}

#[test]
fn damaged_and_cut_answers_are_asked_for_again() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(20, 4));
        let inside = Inside::start(&site, |config| config.wait_limit = Duration::from_secs(30));
        inside.faults.script([Fault::Flip, Fault::Truncate, Fault::Flip, Fault::Fail(ErrorKind::Timeout)]);
        inside.faults.set_truncate(0.1);
        inside.faults.set_fail(0.1, ErrorKind::Unavailable);
        Mounted::new(&site, &layer, true).check(&layer);
        let stats = of(&inside, &layer);
        assert!(stats.reads.wrong_answers > 0);
        assert_eq!(stats.reads.errors, 0);
    });
}

#[test]
fn a_chunk_that_is_always_wrong_fails_alone_and_raises_an_alarm() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(12, 5));
        let bad = layer.chunk_of("f004");
        // One wrong byte in the store itself.
        let pack = std::fs::File::options().read(true).write(true).open(site.pack_path(&layer, bad)).unwrap();
        let place = layer.places.chunks[bad];
        let mut byte = [0];
        pack.read_exact_at(&mut byte, place.offset + 20).unwrap();
        pack.write_all_at(&[byte[0] ^ 1], place.offset + 20).unwrap();
        let inside = Inside::start(&site, |_| {});
        let mounted = Mounted::new(&site, &layer, true);
        for (name, content) in &layer.files {
            match mounted.read(name) {
                Ok(read) => assert!(read == *content && name != "f004", "{name}"),
                Err(error) => assert_eq!((name.as_str(), error.raw_os_error()), ("f004", Some(libc::EIO))),
            }
        }
        let seen = events_until(&inside.socket, |event| matches!(event, Event::ReadFailed { .. }));
        let alarm = |event: &Event| matches!(event, Event::CorruptChunk { layer: id, chunk, .. } if *id == layer.id && *chunk as usize == bad);
        assert!(seen.iter().any(|r| alarm(&r.event)), "{seen:?}");
        // The rest of its file is readable too.
        let file = inside.file(&layer);
        let after = layer.offset(bad + 1);
        let length = layer.manifest.chunks[bad + 1].len as usize;
        assert!(read_direct(&file, after, length).unwrap() == layer.data()[after as usize..][..length]);
        assert!(read_direct(&file, layer.offset(bad), 4096).is_err());
        // Repaired, it is read.
        pack.write_all_at(&byte, place.offset + 20).unwrap();
        until("a repaired chunk", || mounted.read("f004").is_ok_and(|read| read == layer.files["f004"]));
    });
}

#[test]
fn places_that_lead_astray_are_replaced_by_those_of_the_store() {
    within(60, || {
        let site = Site::new();
        for (n, damage) in [0_u8, 1, 2].into_iter().enumerate() {
            let layer = site.layer(files(6, 60 + n as u64));
            let path = layer.dir.join("places");
            let mut places = layer.places.clone();
            match damage {
                0 => std::fs::remove_file(&path).unwrap(),
                1 => {
                    places.chunks.reverse();
                    std::fs::write(&path, places.encode()).unwrap();
                }
                _ => {
                    places.chunks.iter_mut().for_each(|p| (p.offset, p.stored) = (1 << 50, u32::MAX));
                    std::fs::write(&path, places.encode()).unwrap();
                }
            }
            let inside = Inside::start(&site, |_| {});
            Mounted::new(&site, &layer, true).check(&layer);
            assert_eq!(of(&inside, &layer).reads.errors, 0);
        }
    });
}

#[test]
fn layers_come_and_go() {
    within(60, || {
        let site = Site::new();
        let inside = Inside::start(&site, |_| {});
        let lazy = site.root().join("lazy");
        assert_eq!(std::fs::read_dir(&lazy).unwrap().count(), 0);
        let (one, two) = (site.layer(files(2, 11)), site.layer(files(3, 12)));
        let mut listed: Vec<String> =
            std::fs::read_dir(&lazy).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        let mut names = [one.id.hex(), two.id.hex()];
        listed.sort();
        names.sort();
        assert_eq!(listed, names);
        let file = inside.file(&one);
        assert_eq!(file.metadata().unwrap().len(), one.manifest.data_len);
        rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::DIRECT).unwrap();
        read_direct(&file, 0, 4096).unwrap();
        // What is open stays readable, all of it, until it is closed.
        std::fs::remove_dir_all(&one.dir).unwrap();
        client(&inside.socket, async |link| link.forget(one.id).await.unwrap());
        let whole = read_direct(&file, 0, one.manifest.data_len as usize).unwrap();
        assert!(whole == one.data());
        drop(file);
        assert!(!lazy.join(one.id.hex()).exists());
        until("a layer that is forgotten", || inside.stats().layers.iter().all(|l| l.layer != one.id));
        // It comes back as another directory.
        let again = site.layer(files(2, 11));
        assert_eq!(again.id, one.id);
        Mounted::new(&site, &again, true).check(&again);
        Mounted::new(&site, &two, true).check(&two);
        // One whose manifest is not its own.
        std::fs::create_dir(site.root().join("layers").join("0".repeat(64))).unwrap();
        std::fs::copy(two.dir.join("manifest"), site.root().join("layers").join("0".repeat(64)).join("manifest"))
            .unwrap();
        let error = std::fs::File::open(lazy.join("0".repeat(64))).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        for unknown in ["1".repeat(64), "x".to_owned(), format!("sha256:{}", two.id)] {
            let error = std::fs::File::open(lazy.join(unknown)).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
        }
    });
}

#[test]
fn nothing_can_be_written() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(1, 13));
        let _inside = Inside::start(&site, |_| {});
        let lazy = site.root().join("lazy");
        let path = lazy.join(layer.id.hex());
        let refusals = [
            std::fs::File::options().write(true).open(&path).map(drop),
            std::fs::write(lazy.join("new"), "x"),
            std::fs::remove_file(&path),
            std::fs::create_dir(lazy.join("new")),
            std::fs::rename(&path, lazy.join("new")),
            std::os::unix::fs::symlink("x", lazy.join("new")),
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)),
        ];
        for refusal in refusals {
            assert_eq!(refusal.unwrap_err().raw_os_error(), Some(libc::EROFS));
        }
    });
}

#[test]
fn memory_is_bounded_whatever_is_read() {
    within(120, || {
        let site = Site::new();
        let layer = Arc::new(site.layer(files(80, 14)));
        let inside = Inside::start(&site, |config| config.limits.bytes = 8 << 20);
        inside.faults.set_latency(Duration::from_millis(2));
        client(&inside.socket, async |link| link.open(layer.id, "any").await.unwrap());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| Mounted::new(&site, &layer, true).check(&layer));
            }
        });
        let stats = inside.stats();
        println!("80 MiB at most {} bytes at once", stats.in_flight_peak_bytes);
        assert!(stats.in_flight_peak_bytes <= 8 << 20, "{}", stats.in_flight_peak_bytes);
        assert_eq!(of(&inside, &layer).reads.fetched_raw_bytes, 80 << 20);
    });
}

#[test]
fn a_full_disk_fails_no_reads() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(20, 16));
        // The same layer on a file system that has room for little of it.
        let small = site.dir.path().join("small");
        std::fs::create_dir_all(small.join("layers")).unwrap();
        let options = std::ffi::CString::new("size=4m").unwrap();
        let at = small.join("layers");
        rustix::mount::mount("tmpfs", &at, "tmpfs", rustix::mount::MountFlags::empty(), Some(options.as_c_str()))
            .unwrap();
        let dir = at.join(layer.id.hex());
        std::fs::create_dir(&dir).unwrap();
        for name in ["manifest", "places", "present"] {
            std::fs::copy(layer.dir.join(name), dir.join(name)).unwrap();
        }
        let inside = Inside::start(&site, |config| config.root = small.clone());
        let file = inside.file(&layer);
        let want = layer.data();
        for (n, part) in want.chunks(300 << 10).enumerate() {
            let read = read_direct(&file, (n * (300 << 10)) as u64, part.len());
            assert!(read.unwrap() == part, "{n}");
        }
        let stats = of(&inside, &layer);
        assert!(stats.reads.errors == 0 && stats.chunks_present > 5 && stats.chunks_present < 40, "{stats:?}");
        drop(file);
        drop(inside);
        rustix::mount::unmount(&at, rustix::mount::UnmountFlags::empty()).unwrap();
    });
}
