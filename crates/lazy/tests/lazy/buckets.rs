//! The server of lazy reads on a bucket of a real S3 server.

use crate::s3::{BUCKET, KEY_ID, SECRET, Server};
use crate::support::*;
use corral_lazy::control::Event;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The site's store as a bucket, with a runtime that serves it.
struct Bucket {
    server: Server,
    _runtime: tokio::runtime::Runtime,
}

impl Bucket {
    /// Takes what was published at the site.
    fn of(site: &Site) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let server = runtime.block_on(Server::start());
        let prefix = server.dir.path().join(BUCKET).join("some/prefix");
        std::fs::create_dir_all(prefix.parent().unwrap()).unwrap();
        let copied = std::process::Command::new("cp").arg("-r").arg(site.store()).arg(&prefix).status().unwrap();
        assert!(copied.success());
        Self { server, _runtime: runtime }
    }

    fn start(&self, site: &Site, wait: Duration) -> Held {
        let credentials = [("AWS_ACCESS_KEY_ID", KEY_ID), ("AWS_SECRET_ACCESS_KEY", SECRET)];
        let address = self.server.address;
        Held::start_in(site, &credentials, |options| {
            options.server.wait_limit = wait;
            options.store = format!(
                "s3://{BUCKET}/some/prefix?region=us-east-1&endpoint=http://{address}&allow_http=true&path_style=true"
            );
        })
    }

    /// Every request is answered with 503 from now on, or none.
    fn set_down(&self, is_down: bool) {
        self.server.hook.busy.store(if is_down { u64::MAX } else { 0 }, Ordering::Relaxed);
    }
}

#[test]
fn layers_are_read_from_a_bucket_while_servers_are_killed() {
    within(120, || {
        let site = Site::new();
        let layers = [site.layer(files(20, 51)), site.layer(files(20, 52))];
        let bucket = Bucket::of(&site);
        let held = bucket.start(&site, Duration::from_secs(60));
        let mut killed = 0;
        std::thread::scope(|scope| {
            let readers: Vec<_> =
                layers.iter().map(|layer| scope.spawn(|| Mounted::new(&site, layer, true).check(layer))).collect();
            while readers.iter().any(|reader| !reader.is_finished()) {
                std::thread::sleep(Duration::from_millis(300));
                held.kill_server();
                killed += 1;
            }
        });
        println!("{killed} servers killed");
        for layer in &layers {
            // A killed server may have left the last step to the next one that is asked.
            Mounted::new(&site, layer, true).check(layer);
            until("a complete layer", || !layer.dir.join("present").exists());
            assert!(std::fs::read(layer.dir.join("data")).unwrap() == layer.data());
        }
        held.end();
    });
}

#[test]
fn a_bucket_that_fails_is_waited_for_and_one_that_stays_so_is_an_error() {
    within(120, || {
        let site = Site::new();
        let layer = site.layer(files(12, 53));
        let bucket = Bucket::of(&site);
        let held = bucket.start(&site, Duration::from_secs(60));
        let mounted = Mounted::new(&site, &layer, true);
        assert!(mounted.read("f002").unwrap() == layer.files["f002"]);
        bucket.set_down(true);
        let path = mounted.at.join("f000");
        let reader = std::thread::spawn(move || std::fs::read(path));
        let waiting = || client(&held.options.socket, async |link| link.stats().await.unwrap().waiting_reads);
        until("readers that wait", || waiting() > 0);
        assert!(Mounted::new(&site, &layer, true).read("f002").unwrap() == layer.files["f002"], "what is here is read");
        assert!(!reader.is_finished());
        bucket.set_down(false);
        assert!(reader.join().unwrap().unwrap() == layer.files["f000"]);
        mounted.check(&layer);
        drop(mounted);
        held.end();

        layer.empty();
        let held = bucket.start(&site, Duration::from_secs(2));
        let mounted = Mounted::new(&site, &layer, true);
        bucket.set_down(true);
        let begin = Instant::now();
        assert_eq!(mounted.read("f001").unwrap_err().raw_os_error(), Some(libc::EIO));
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
        events_until(&held.options.socket, |event| matches!(event, Event::ReadFailed { .. }));
        bucket.set_down(false);
        until("a bucket that is back", || mounted.read("f001").is_ok_and(|read| read == layer.files["f001"]));
        drop(mounted);
        held.end();
    });
}

#[test]
fn what_is_missing_in_a_bucket_fails_at_once_and_an_empty_bucket_is_waited_for() {
    within(120, || {
        let site = Site::new();
        let layer = site.layer(files(12, 54));
        let bucket = Bucket::of(&site);
        let prefix = bucket.server.dir.path().join(BUCKET).join("some/prefix");
        let pack = site.pack_path(&layer, layer.chunk_of("f000"));
        let there = prefix.join(pack.strip_prefix(site.store()).unwrap());
        std::fs::rename(&there, site.dir.path().join("pack")).unwrap();
        let held = bucket.start(&site, Duration::from_secs(40));
        let mounted = Mounted::new(&site, &layer, true);
        let begin = Instant::now();
        assert_eq!(mounted.read("f000").unwrap_err().raw_os_error(), Some(libc::EIO));
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
        std::fs::rename(site.dir.path().join("pack"), &there).unwrap();
        std::fs::rename(&prefix, site.dir.path().join("away")).unwrap();
        let path = mounted.at.join("f008");
        let reader = std::thread::spawn(move || std::fs::read(path));
        let waiting = || client(&held.options.socket, async |link| link.stats().await.unwrap().waiting_reads);
        until("readers that wait", || waiting() > 0);
        std::thread::sleep(Duration::from_millis(500));
        assert!(!reader.is_finished());
        std::fs::rename(site.dir.path().join("away"), &prefix).unwrap();
        assert!(reader.join().unwrap().unwrap() == layer.files["f008"]);
        drop(mounted);
        held.end();
    });
}
