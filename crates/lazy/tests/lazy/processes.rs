//! Holder and server as processes: what readers see while these end and change.

use crate::support::*;
use corral_lazy::client::LazyProcess;
use corral_lazy::control::{Event, RestartCause};
use corral_lazy::options::Options;
use corral_lazy::{Lifeline, holder};
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Reads whole trees again and again, one layer after the other, each time through a new mount, until told to stop.
fn readers(
    site: &Arc<Site>,
    layers: Vec<Layer>,
    count: usize,
) -> (Arc<AtomicBool>, Vec<std::thread::JoinHandle<usize>>) {
    let (stop, layers) = (Arc::new(AtomicBool::new(false)), Arc::new(layers));
    let reader = |number| {
        let (site, layers, stop) = (Arc::clone(site), Arc::clone(&layers), Arc::clone(&stop));
        std::thread::spawn(move || {
            for rounds in 1.. {
                let layer = &layers[(number + rounds) % layers.len()];
                Mounted::new(&site, layer, true).check(layer);
                if stop.load(Ordering::Relaxed) {
                    return rounds;
                }
            }
            unreachable!()
        })
    };
    let threads = (0..count).map(reader).collect();
    (stop, threads)
}

#[test]
fn a_cold_read_gives_the_tree_and_the_layer_becomes_complete() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(30, 1));
        let held = Held::start(&site, |_| {});
        Mounted::new(&site, &layer, true).check(&layer);
        until("a complete layer", || !layer.dir.join("present").exists());
        assert!(std::fs::read(layer.dir.join("data")).unwrap() == layer.data());
        // Its own file serves without a server.
        held.end();
        Mounted::new(&site, &layer, false).check(&layer);
    });
}

#[test]
fn readers_notice_nothing_of_servers_that_are_killed() {
    within(120, || {
        let site = Arc::new(Site::new());
        let layers = (0..6).map(|n| site.layer(files(20, 200 + n))).collect();
        // Small windows, so that much is still missing when servers end.
        let held = Held::start(&site, |_| {});
        let (stop, threads) = readers(&site, layers, 3);
        let end = Instant::now() + Duration::from_secs(8);
        let mut killed = 0;
        while Instant::now() < end {
            held.kill_server();
            killed += 1;
            std::thread::sleep(Duration::from_millis(200));
            assert!(threads.iter().all(|t| !t.is_finished()), "a reader failed");
        }
        stop.store(true, Ordering::Relaxed);
        let rounds: usize = threads.into_iter().map(|t| t.join().unwrap()).sum();
        println!("{killed} servers killed during {rounds} rounds");
        assert!(killed > 10 && rounds >= 3);
        held.end();
    });
}

#[test]
fn a_holder_goes_on_as_another_program_under_load() {
    within(120, || {
        let site = Arc::new(Site::new());
        let layers = (0..3).map(|n| site.layer(files(20, 300 + n))).collect();
        let held = Held::start(&site, |_| {});
        let before = held.who();
        let copy = site.dir.path().join("another");
        std::fs::copy(program(), &copy).unwrap();
        let (stop, threads) = readers(&site, layers, 2);
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
        let site = Arc::new(Site::new());
        let layers = vec![site.layer(files(20, 4))];
        let held = Held::start(&site, |_| {});
        let before = held.who();
        let (stop, threads) = readers(&site, layers, 2);
        corral_sys::process::kill(held.pid(), libc::SIGKILL).unwrap();
        until("another holder", || {
            held.try_who().is_some_and(|who| who.holder_pid == before.server_pid && who.server_pid != before.server_pid)
        });
        stop.store(true, Ordering::Relaxed);
        assert!(threads.into_iter().all(|t| t.join().unwrap() > 0));
        held.end();
    });
}

/// Starts a holder in the place of those that are gone, or stand still where nothing was kept of them.
fn another(options: &Options, kept: Option<&Lifeline>) -> Child {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let log = options.socket.with_extension("log");
    let (program, log) = (program(), log.as_path());
    runtime.block_on(async {
        let process = match kept {
            Some(kept) => LazyProcess::go_on(&program, options, log, kept).await,
            None => LazyProcess::replace(&program, options, log).await,
        };
        process.unwrap_or_else(|e| panic!("{e}: {}", std::fs::read_to_string(log).unwrap())).started.unwrap()
    })
}

/// Holder and server, by a signal that neither can catch.
fn signal_both(root: &std::path::Path, signal: i32) {
    let pids = holder::processes(root);
    assert_eq!(pids.len(), 2, "holder and server: {pids:?}");
    for pid in pids {
        corral_sys::process::kill(pid, signal).unwrap();
    }
}

#[test]
fn readers_outlive_holder_and_server_where_their_connection_is_kept() {
    within(120, || {
        let site = Arc::new(Site::new());
        let root = site.root();
        let layers: Vec<Layer> = (0..6).map(|n| site.layer(files(20, 400 + n))).collect();
        let held = Held::start(&site, |_| {});
        let (options, first) = (held.options.clone(), held.who());
        let mut kept = Lifeline::of(first.holder_pid).unwrap();
        let (stop, threads) = readers(&site, layers, 3);
        let mut children = Vec::new();
        for round in 0..5 {
            std::thread::sleep(Duration::from_millis(200));
            signal_both(&root, libc::SIGKILL);
            until("their end", || !holder::is_held(&root));
            assert!(kept.is_connected() && holder::is_lost(&root));
            children.push(another(&options, Some(&kept)));
            assert!(holder::is_held(&root) && !holder::is_lost(&root));
            // Each can be followed by another, with what was kept of it or of one before.
            if round % 2 == 0 {
                kept = Lifeline::of(children.last().unwrap().id() as i32).unwrap();
            }
            assert!(threads.iter().all(|t| !t.is_finished()), "a reader failed");
        }
        stop.store(true, Ordering::Relaxed);
        assert!(threads.into_iter().all(|t| t.join().unwrap() > 0));
        let stats = client(&options.socket, async |link| link.stats().await.unwrap());
        assert_eq!(stats.restarts.crashed, 5);
        // One at a time, also in this way.
        let nothing = format!("{}:1000000,1000001", std::process::id());
        let late = || {
            let mut command = std::process::Command::new(program());
            let output = command.args(["hold", "--from", &nothing]).args(options.words()).output().unwrap();
            String::from_utf8_lossy(&output.stderr).into_owned()
        };
        assert!(late().contains("another holder serves"));
        held.end();
        for child in &mut children {
            child.wait().unwrap();
        }
        // What is kept of one that was told to end keeps nothing mounted.
        until("the end of the connection", || !kept.is_connected());
        let said = late();
        assert!(said.contains(&format!("descriptors cannot be copied from {nothing:?}")), "{said}");
        assert!(!options.socket.exists() && !holder::is_held(&root));
    });
}

#[test]
fn holder_and_server_that_stand_still_are_replaced_under_their_readers() {
    within(60, || {
        let site = Arc::new(Site::new());
        let layers = (0..3).map(|n| site.layer(files(20, 500 + n))).collect();
        let held = Held::start(&site, |_| {});
        let (options, root) = (held.options.clone(), site.root());
        let (stop, threads) = readers(&site, layers, 2);
        signal_both(&root, libc::SIGSTOP);
        // A signal is on its way for a moment.
        until("nobody answers", || held.try_who().is_none());
        assert!(holder::is_held(&root));
        let mut child = another(&options, None);
        let now = held.who();
        assert_eq!(now.holder_pid, child.id() as i32);
        stop.store(true, Ordering::Relaxed);
        assert!(threads.into_iter().all(|t| t.join().unwrap() > 0));
        held.end();
        child.wait().unwrap();
    });
}

#[test]
fn one_holder_for_a_root_and_what_a_dead_one_left_is_taken_away() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(1, 5));
        // As a holder and server leave it that died together.
        drop(corral_lazy::holder::mount(&site.root()).unwrap());
        std::os::unix::net::UnixListener::bind(site.dir.path().join("c.sock")).map(drop).unwrap();
        assert!(std::fs::metadata(site.root().join("lazy")).is_err(), "it is dead");
        assert!(holder::is_lost(&site.root()) && holder::processes(&site.root()).is_empty());
        let held = Held::start(&site, |_| {});
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&held.options.socket).unwrap());
        assert_eq!(mode & 0o777, 0o600);
        Mounted::new(&site, &layer, true).check(&layer);
        let mut second = held.options.clone();
        second.socket = site.dir.path().join("other.sock");
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
        let site = Site::new();
        let options = corral_lazy::options::Options::new(
            site.root(),
            format!("file://{}", site.store().display()),
            site.dir.path().join("c.sock"),
        );
        let log = site.dir.path().join("log");
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
        assert_no_mount(&site.root());
    });
}

#[test]
fn servers_that_cannot_start_are_not_started_without_a_pause() {
    within(60, || {
        let site = Site::new();
        let held = Held::start(&site, |_| {});
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

#[test]
fn a_power_cut_of_the_whole_node_costs_fetches_and_nothing_else() {
    within(90, || {
        let site = Site::new();
        let layer = site.layer(files(20, 6));
        for boot in 0..4_u64 {
            let held = Held::start(&site, |options| {
                options.server.boot_id = Some(format!("boot {boot}"));
                only_what_is_read(&mut options.server);
            });
            let mounted = Mounted::new(&site, &layer, true);
            // Only some of it, so that it never becomes complete.
            for name in layer.files.keys().filter(|name| !name.ends_with("9")) {
                assert!(mounted.read(name).unwrap() == layer.files[name], "{name} under boot {boot}");
            }
            drop(mounted);
            // Both at once; then what the disk did not get.
            let who = held.who();
            for pid in [who.server_pid, who.holder_pid] {
                corral_sys::process::kill(pid, libc::SIGSTOP).unwrap();
            }
            for pid in [who.server_pid, who.holder_pid] {
                corral_sys::process::kill(pid, libc::SIGKILL).unwrap();
            }
            held.gone();
            until("the end of both", || !is_there(who.server_pid) && !is_there(who.holder_pid));
            let tear = |name: &str, from: u64, bytes: &[u8]| {
                let file = std::fs::File::options().write(true).open(layer.dir.join(name)).unwrap();
                std::os::unix::fs::FileExt::write_all_at(&file, bytes, from).unwrap();
            };
            tear("data", 1_000_000 * boot, &noise(2_000_000, boot));
            tear("data", 9_000_000, &vec![0; 3_000_000]);
            tear("present", 20 + boot, &noise(40, boot));
            if boot == 2 {
                std::fs::File::options().write(true).open(layer.dir.join("data")).unwrap().set_len(5_000_000).unwrap();
            }
        }
        let held = Held::start(&site, |_| {});
        Mounted::new(&site, &layer, true).check(&layer);
        held.end();
    });
}

#[test]
fn the_memory_of_a_server_is_bounded() {
    within(120, || {
        let site = Arc::new(Site::new());
        let layers = vec![site.layer(files(80, 7))];
        let held = Held::start(&site, |options| options.server.limits.bytes = 8 << 20);
        let (stop, threads) = readers(&site, layers, 6);
        stop.store(true, Ordering::Relaxed);
        assert!(threads.into_iter().all(|t| t.join().unwrap() > 0));
        let status = std::fs::read_to_string(format!("/proc/{}/status", held.who().server_pid)).unwrap();
        let of = |name: &str| -> u64 {
            let line = status.lines().find_map(|l| l.strip_prefix(name)).unwrap();
            line.trim().trim_end_matches(" kB").parse().unwrap()
        };
        // Without the program itself, which a debug build makes large.
        let peak = of("VmHWM:") - of("RssFile:");
        println!("80 MiB with 8 MiB under way took {peak} KiB of memory");
        // Buffers of threads and for answers are some 25 MiB.
        assert!(peak < 48 << 10, "{status}");
        held.end();
    });
}

#[test]
fn a_holder_ends_when_its_mount_is_taken_away() {
    within(60, || {
        let site = Site::new();
        let held = Held::start(&site, |_| {});
        let who = held.who();
        rustix::mount::unmount(site.root().join("lazy"), rustix::mount::UnmountFlags::empty()).unwrap();
        assert!(!held.gone().success());
        assert!(!is_there(who.server_pid) && !site.dir.path().join("c.sock").exists());
    });
}

#[test]
fn a_server_that_stands_still_is_replaced_and_readers_go_on() {
    within(60, || {
        let site = Site::new();
        let layers = [site.layer(files(15, 8)), site.layer(files(15, 18))];
        let held = Held::start(&site, |options| options.still = Duration::from_secs(1));
        for (round, layer) in (1..).zip(&layers) {
            assert!(Mounted::new(&site, layer, true).read("f000").unwrap() == layer.files["f000"]);
            let still = held.who().server_pid;
            corral_sys::process::kill(still, libc::SIGSTOP).unwrap();
            let begin = Instant::now();
            // Asked of the one that stands still, answered by the next.
            Mounted::new(&site, layer, true).check(layer);
            let took = begin.elapsed();
            assert!(took < Duration::from_secs(10), "{took:?}");
            assert!(!is_there(still) && held.who().server_pid != still);
            let restarts = client(&held.options.socket, async |link| link.stats().await.unwrap().restarts);
            assert_eq!((restarts.crashed, restarts.still), (0, round));
            let cause = RestartCause::Still;
            events_until(&held.options.socket, |event| *event == Event::Restarted { cause });
        }
        let killed = held.kill_server();
        until("another server", || held.try_who().is_some_and(|who| who.server_pid != killed));
        events_until(&held.options.socket, |event| *event == Event::Restarted { cause: RestartCause::Crashed });
        held.end();
    });
}

#[test]
fn a_server_whose_store_hangs_does_not_stand_still() {
    within(60, || {
        let site = Arc::new(Site::new());
        let layer = site.layer(files(4, 9));
        // A store that cannot be opened is asked again and again.
        let away = site.dir.path().join("away");
        std::fs::rename(site.store(), &away).unwrap();
        let held = Held::start(&site, |options| options.still = Duration::from_millis(500));
        let server = held.who().server_pid;
        let reader = std::thread::spawn({
            let site = Arc::clone(&site);
            move || Mounted::new(&site, &layer, true).check(&layer)
        });
        let waiting = || client(&held.options.socket, async |link| link.stats().await.unwrap().waiting_reads);
        until("readers that wait", || waiting() > 0);
        // Several times as long as it may be silent.
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end {
            assert_eq!(held.who().server_pid, server);
            std::thread::sleep(Duration::from_millis(100));
        }
        std::fs::rename(&away, site.store()).unwrap();
        reader.join().unwrap();
        assert_eq!(held.who().server_pid, server);
        held.end();
    });
}
