//! Stores that are missing, and stores that miss something.

use crate::support::*;
use corral_lazy::control::Event;
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use std::time::{Duration, Instant};

/// The site's store, mounted at a place of its own.
struct Place<'a>(&'a Site);

impl<'a> Place<'a> {
    fn new(site: &'a Site) -> Self {
        let place = Self(site);
        std::fs::create_dir(place.path()).unwrap();
        place.mount();
        place
    }

    fn path(&self) -> std::path::PathBuf {
        self.0.dir.path().join("place")
    }

    fn mount(&self) {
        mount_bind(self.0.store(), self.path()).unwrap();
    }

    fn unmount(&self) {
        unmount(self.path(), UnmountFlags::DETACH).unwrap();
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        unmount(self.path(), UnmountFlags::DETACH).unwrap_or(());
    }
}

fn reason_of(held: &Held) -> String {
    let seen = events_until(&held.options.socket, |event| matches!(event, Event::ReadFailed { .. }));
    match &seen.last().unwrap().event {
        Event::ReadFailed { reason, .. } => reason.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_store_whose_mount_is_missing_is_waited_for() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(8, 31));
        let place = Place::new(&site);
        let held = Held::start(&site, |options| {
            options.store = format!("file://{}", place.path().display());
            options.server.wait_limit = Duration::from_secs(15);
        });
        let mounted = Mounted::new(&site, &layer, true);
        assert!(mounted.read("f002").unwrap() == layer.files["f002"]);
        place.unmount();
        // One that has the old directory open reads on; the next finds the empty one.
        let killed = held.kill_server();
        until("another server", || held.try_who().is_some_and(|who| who.server_pid != killed));
        let at = mounted.at.join("f000");
        let reader = std::thread::spawn(move || std::fs::read(at));
        let waiting = || client(&held.options.socket, async |link| link.stats().await.unwrap().waiting_reads);
        until("readers that wait", || waiting() > 0);
        std::thread::sleep(Duration::from_millis(500));
        assert!(!reader.is_finished() && waiting() > 0);
        place.mount();
        assert!(reader.join().unwrap().unwrap() == layer.files["f000"]);
        mounted.check(&layer);
        drop(mounted);
        held.end();
    });
}

#[test]
fn a_store_whose_mount_stays_missing_fails_reads_in_time_and_says_why() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(8, 32));
        let place = Place::new(&site);
        place.unmount();
        let held = Held::start(&site, |options| {
            options.store = format!("file://{}", place.path().display());
            options.server.wait_limit = Duration::from_secs(2);
        });
        let mounted = Mounted::new(&site, &layer, true);
        let begin = Instant::now();
        let error = mounted.read("f001").unwrap_err();
        let took = begin.elapsed();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        assert!(took > Duration::from_millis(1900) && took < Duration::from_secs(6), "{took:?}");
        let reason = reason_of(&held);
        assert!(reason.contains("nothing below packs: its place is empty"), "{reason}");
        place.mount();
        until("a store that is back", || mounted.read("f001").is_ok_and(|read| read == layer.files["f001"]));
        drop(mounted);
        held.end();
    });
}

#[test]
fn what_is_missing_in_a_store_that_is_there_fails_at_once() {
    within(60, || {
        let site = Site::new();
        let layer = site.layer(files(12, 33));
        let missing = layer.chunk_of("f000");
        std::fs::remove_file(site.pack_path(&layer, missing)).unwrap();
        let held = Held::start(&site, |options| options.server.wait_limit = Duration::from_secs(30));
        let mounted = Mounted::new(&site, &layer, true);
        let begin = Instant::now();
        assert_eq!(mounted.read("f000").unwrap_err().raw_os_error(), Some(libc::EIO));
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        let reason = reason_of(&held);
        assert!(reason.contains("is not in the store"), "{reason}");
        drop(mounted);
        held.end();
    });
}
