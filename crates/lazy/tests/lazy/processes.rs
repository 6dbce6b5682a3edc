//! Holder and server as processes: what readers see while these end and change.

use crate::support::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Reads whole trees again and again, each time through a new mount, until told to stop.
fn readers(
    place: &Arc<Site>,
    layer: &Arc<Layer>,
    count: usize,
) -> (Arc<AtomicBool>, Vec<std::thread::JoinHandle<u32>>) {
    let stop = Arc::new(AtomicBool::new(false));
    let reader = |_| {
        let (place, layer, stop) = (Arc::clone(place), Arc::clone(layer), Arc::clone(&stop));
        std::thread::spawn(move || {
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) {
                Mounted::new(&place, &layer, true).check(&layer);
                rounds += 1;
            }
            rounds
        })
    };
    let threads = (0..count).map(reader).collect();
    (stop, threads)
}

#[test]
fn a_cold_read_gives_the_tree_and_the_layer_becomes_complete() {
    within(60, || {
        let place = Site::new();
        let layer = place.layer(files(30, 1));
        let held = Held::start(&place, |_| {});
        Mounted::new(&place, &layer, true).check(&layer);
        until("a complete layer", || !layer.dir.join("present").exists());
        assert!(std::fs::read(layer.dir.join("data")).unwrap() == layer.data());
        // Its own file serves without a server.
        held.end();
        Mounted::new(&place, &layer, false).check(&layer);
    });
}

#[test]
fn readers_notice_nothing_of_servers_that_are_killed() {
    within(120, || {
        let place = Arc::new(Site::new());
        let layer = Arc::new(place.layer(files(40, 2)));
        let held = Held::start(&place, |_| {});
        let (stop, threads) = readers(&place, &layer, 3);
        let end = Instant::now() + Duration::from_secs(8);
        let mut killed = 0;
        while Instant::now() < end {
            held.kill_server();
            killed += 1;
            std::thread::sleep(Duration::from_millis(200));
            if killed % 8 == 0 {
                // All over again.
                assert!(threads.iter().all(|t| !t.is_finished()), "a reader failed");
            }
        }
        stop.store(true, Ordering::Relaxed);
        let rounds: u32 = threads.into_iter().map(|t| t.join().unwrap()).sum();
        println!("{killed} servers killed during {rounds} rounds");
        assert!(killed > 10 && rounds >= 3);
        held.end();
    });
}

#[test]
fn a_holder_goes_on_as_another_program_under_load() {
    within(120, || {
        let place = Arc::new(Site::new());
        let layer = Arc::new(place.layer(files(40, 3)));
        let held = Held::start(&place, |_| {});
        let before = held.who();
        let copy = place.dir.path().join("another");
        std::fs::copy(program(), &copy).unwrap();
        let (stop, threads) = readers(&place, &layer, 2);
        for round in 0..3 {
            let program = if round % 2 == 0 { copy.clone() } else { program() };
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let server = held.who().server_pid;
            runtime.block_on(async {
                let link = corral_lazy::client::LazyLink::connect(&held.options.socket).await.unwrap();
                link.upgrade(&program).await.unwrap();
            });
            until("another server", || held.try_who().is_some_and(|who| who.server_pid != server));
            let exe = std::fs::read_link(format!("/proc/{}/exe", held.pid())).unwrap();
            assert_eq!(exe, program, "in the same process");
        }
        let server = held.who().server_pid;
        corral_sys::process::kill(held.pid(), libc::SIGHUP).unwrap();
        until("another server", || held.try_who().is_some_and(|who| who.server_pid != server));
        let refused = client(&held.options.socket, async |link| {
            link.who().await.unwrap();
            let link = corral_lazy::client::LazyLink::connect(&held.options.socket).await.unwrap();
            link.upgrade(std::path::Path::new("/bin/true")).await
        });
        assert!(refused.unwrap_err().to_string().contains("not a program that says"));
        stop.store(true, Ordering::Relaxed);
        assert!(threads.into_iter().all(|t| t.join().unwrap() > 0));
        let after = held.who();
        assert_eq!((after.holder_pid, after.holder_pid), (before.holder_pid, held.pid()));
        held.end();
    });
}

#[test]
fn a_server_takes_the_place_of_a_holder_that_is_killed() {
    within(60, || {
        let place = Arc::new(Site::new());
        let layer = Arc::new(place.layer(files(20, 4)));
        let held = Held::start(&place, |_| {});
        let before = held.who();
        let (stop, threads) = readers(&place, &layer, 2);
        corral_sys::process::kill(held.pid(), libc::SIGKILL).unwrap();
        until("another holder", || {
            held.try_who().is_some_and(|who| who.holder_pid == before.server_pid && who.server_pid != before.server_pid)
        });
        stop.store(true, Ordering::Relaxed);
        assert!(threads.into_iter().all(|t| t.join().unwrap() > 0));
        held.end();
    });
}

#[test]
fn one_holder_for_a_root_and_what_a_dead_one_left_is_taken_away() {
    within(60, || {
        let place = Site::new();
        let layer = place.layer(files(1, 5));
        // As a holder and server leave it that died together.
        drop(corral_lazy::holder::mount(&place.root()).unwrap());
        std::os::unix::net::UnixListener::bind(place.dir.path().join("c.sock")).map(drop).unwrap();
        assert!(std::fs::metadata(place.root().join("lazy")).is_err(), "it is dead");
        let held = Held::start(&place, |_| {});
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&held.options.socket).unwrap());
        assert_eq!(mode & 0o777, 0o600);
        Mounted::new(&place, &layer, true).check(&layer);
        let mut second = held.options.clone();
        second.socket = place.dir.path().join("other.sock");
        let refused = std::process::Command::new(program()).arg("hold").args(second.words()).output().unwrap();
        assert!(!refused.status.success());
        assert!(String::from_utf8_lossy(&refused.stderr).contains("another holder serves"), "{refused:?}");
        assert!(!second.socket.exists());
        held.end();
    });
}

#[test]
fn a_client_finds_a_holder_or_starts_one() {
    within(60, || {
        let place = Site::new();
        let options = corral_lazy::options::Options::new(
            place.root(),
            format!("file://{}", place.store().display()),
            place.dir.path().join("c.sock"),
        );
        let log = place.dir.path().join("log");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            use corral_lazy::client::{LazyProcess, ProcessError};
            let mut first = LazyProcess::ensure(&program(), &options, &log).await.unwrap();
            let mut child = first.started.take().unwrap();
            assert_eq!(first.who.holder_pid, child.id() as i32);
            let second = LazyProcess::ensure(&program(), &options, &log).await.unwrap();
            assert!(second.started.is_none());
            assert_eq!(second.who, first.who);
            let pid = rustix::process::Pid::from_raw(first.who.holder_pid).unwrap();
            assert_eq!(rustix::process::getsid(Some(pid)).unwrap(), pid, "a session of its own");
            corral_sys::process::kill(first.who.holder_pid, libc::SIGTERM).unwrap();
            assert!(child.wait().unwrap().success());
            let mut bad = options.clone();
            bad.store = "nonsense".to_owned();
            let error = LazyProcess::ensure(&program(), &bad, &log).await.unwrap_err();
            assert!(matches!(error, ProcessError::Ended { .. }), "{error}");
        });
        assert_no_mount(&place.root());
    });
}

#[test]
fn servers_that_cannot_start_are_not_started_without_a_pause() {
    within(60, || {
        let place = Site::new();
        let held = Held::start(&place, |_| {});
        let starts = AtomicU32::new(0);
        let end = Instant::now() + Duration::from_secs(2);
        let mut last = 0;
        while Instant::now() < end {
            // Killed as soon as it is seen, by its parent's list of children.
            let children = format!("/proc/{0}/task/{0}/children", held.pid());
            let text = std::fs::read_to_string(children).unwrap();
            if let Some(pid) = text.split_whitespace().next().and_then(|t| t.parse::<i32>().ok())
                && pid != last
            {
                last = pid;
                starts.fetch_add(1, Ordering::Relaxed);
                corral_sys::process::kill(pid, libc::SIGKILL).unwrap_or(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(starts.load(Ordering::Relaxed) < 20, "{starts:?}");
        held.end();
    });
}
