//! Importing from a real registry (Debian's `docker-registry`) on loopback, with and without a login, and from small
//! lying ones.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::images::{Layout, config};
use common::tarball::{dir, file, gzip, tar, whiteout, zstd};
use common::{TestDir, import, merged, no_collapse, options, run, store_files, which};
use corral_api::digest::Digest;
use corral_api::image::ImportProgress;
use corral_api::problem::ErrorKind;
use corral_layers::{CancelFlag, ImageSource, ImportError, RegistryAuth};
use serde_json::json;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// `user` with the password `secret`, as `htpasswd -B` writes it.
const HTPASSWD: &str = "user:$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n";

/// A port that is free now and that no outgoing connection takes meanwhile: below the kernel's ephemeral range.
fn free_port() -> u16 {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let first = 20_000 + std::process::id() as usize % 1000 * 10;
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    (0..2000).map(|_| (first + NEXT.fetch_add(1, Ordering::Relaxed)) as u16).find(free).unwrap()
}

/// A running registry; ended on drop.
struct Registry {
    child: Child,
    port: u16,
    login: bool,
}

impl Registry {
    fn start(d: &TestDir, login: bool) -> Self {
        for tool in ["docker-registry", "skopeo"] {
            assert!(which(tool), "{tool} is not installed");
        }
        let port = free_port();
        let data = d.join("registry-data");
        let mut text = format!(
            "version: 0.1\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n",
            data.display()
        );
        if login {
            let passwords = d.write("htpasswd", HTPASSWD.as_bytes());
            text += &format!("auth: {{htpasswd: {{realm: test, path: {}}}}}\n", passwords.display());
        }
        let config = d.write("registry.yml", text.as_bytes());
        let log = std::fs::File::create(d.join("registry.log")).unwrap();
        let child = Command::new("docker-registry")
            .args(["serve"])
            .arg(config)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let registry = Self { child, port, login };
        let end = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < end, "the registry did not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        registry
    }

    fn push(&self, from: &str, name: &str, extra: &[&str]) {
        let mut copy = Command::new("skopeo");
        copy.args(["--insecure-policy", "copy", "--dest-tls-verify=false"]).args(extra);
        if self.login {
            copy.args(["--dest-creds", "user:secret"]);
        }
        run(copy.arg(from).arg(format!("docker://127.0.0.1:{}/{name}", self.port)));
    }

    fn source(&self, name: &str, auth: RegistryAuth) -> ImageSource {
        ImageSource::Registry { reference: format!("127.0.0.1:{}/{name}", self.port), auth, plain_http: true }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        if let Err(e) = self.child.kill().and_then(|()| self.child.wait()) {
            eprintln!("registry: {e}");
        }
    }
}

fn layers() -> Vec<Vec<u8>> {
    vec![
        tar(&[
            dir("etc").mode(0o711),
            file("etc/a", "1"),
            file("big", (0..300_000u32).map(|n| (n * 7) as u8).collect::<Vec<_>>()),
        ]),
        tar(&[file("etc/b", "2").xattr("user.k", "v").owner(5, 6)]),
        tar(&[whiteout("etc", "a"), file("etc/c", "3")]),
        tar(&[file("d", "4")]),
        tar(&[file("e", "5")]),
    ]
}

fn layout(d: &TestDir) -> String {
    let l = layers();
    let stored = [
        ("+gzip", gzip(&l[0])),
        ("", l[1].clone()),
        ("+zstd", zstd(&l[2])),
        ("+gzip", gzip(&l[3])),
        ("", l[4].clone()),
    ];
    Layout::image(&config(&l), &stored).write(&d.join("layout"));
    format!("oci:{}", d.join("layout").display())
}

#[test]
fn images_pushed_by_skopeo_are_imported_and_reused() {
    let d = TestDir::new();
    let store = d.store();
    let registry = Registry::start(&d, false);
    let from = layout(&d);
    registry.push(&from, "team/image:one", &[]);
    let source = registry.source("team/image:one", RegistryAuth::Anonymous);
    let events = Mutex::new(Vec::new());
    let record = |p: ImportProgress| events.lock().unwrap().push(p);
    let image = store.import_image(&source, &options(), &CancelFlag::new(), &record).unwrap();
    let expected = import(&store, &ImageSource::OciLayout(d.join("layout")), &options()).unwrap();
    assert_eq!((image.digest, &image.layers), (expected.digest, &expected.layers));
    let events = events.into_inner().unwrap();
    assert!(matches!(events[0], ImportProgress::Planned { layers: 5, bytes } if bytes > 0));
    let fetched: std::collections::BTreeSet<u32> = events
        .iter()
        .filter_map(|e| if let ImportProgress::Fetched { layer, .. } = e { Some(*layer) } else { None })
        .collect();
    assert_eq!(fetched.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);

    let apart = import(&store, &source, &no_collapse()).unwrap();
    assert_eq!(apart.layers.len(), 5);
    let tree = merged(&d, &store, &apart).tree();
    assert_eq!(common::names(&tree), ["big", "d", "e", "etc", "etc/b", "etc/c"]);
    assert_eq!((tree["etc"].mode, tree["etc/b"].owner), (0o711, (5, 6)));
    assert_eq!(common::contents(&tree), common::contents(&merged(&d, &store, &image).tree()));

    // By digest; and without the blobs, which are not needed any more.
    let digest = image.source_digest.clone().unwrap();
    assert_eq!(
        import(&store, &registry.source(&format!("team/image@{digest}"), RegistryAuth::Anonymous), &options()).unwrap(),
        image
    );
    for l in layers() {
        let hex = Digest::of(&l).hex();
        let blob = d.join(&format!("registry-data/docker/registry/v2/blobs/sha256/{}/{hex}", &hex[..2]));
        if blob.exists() {
            std::fs::remove_dir_all(blob).unwrap();
        }
    }
    assert_eq!(import(&store, &source, &options()).unwrap(), image);

    // Docker's own manifest format knows no zstd.
    let gzipped: Vec<_> = layers().iter().map(|l| ("+gzip", gzip(l))).collect();
    Layout::image(&config(&layers()), &gzipped).write(&d.join("gzipped"));
    let from = format!("oci:{}", d.join("gzipped").display());
    registry.push(&from, "team/image:docker", &["--format", "v2s2"]);
    let docker = import(&store, &registry.source("team/image:docker", RegistryAuth::Anonymous), &options());
    assert_eq!(docker.unwrap().layers, image.layers);
    let missing = import(&store, &registry.source("team/image:none", RegistryAuth::Anonymous), &options()).unwrap_err();
    assert!(matches!(missing, ImportError::RegistryNotFound { .. }), "{missing:?}");
    let missing = import(&store, &registry.source("nobody/none:1", RegistryAuth::Anonymous), &options()).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound, "{missing:?}");
}

#[test]
fn a_login_is_used_and_a_wrong_one_is_told() {
    let d = TestDir::new();
    let store = d.store();
    let registry = Registry::start(&d, true);
    registry.push(&layout(&d), "private:1", &[]);
    let basic = |password: &str| RegistryAuth::Basic { username: "user".to_owned(), password: password.to_owned() };
    let image = import(&store, &registry.source("private:1", basic("secret")), &options()).unwrap();
    assert_eq!(merged(&d, &store, &image).tree()["etc/c"].data, b"3");
    let before = store_files(&d);
    for auth in [basic("wrong"), RegistryAuth::Anonymous] {
        let error = import(&store, &registry.source("private:1", auth), &options()).unwrap_err();
        assert!(matches!(error, ImportError::RegistryUnauthorized { .. }), "{error:?}");
    }
    assert_eq!(store_files(&d), before);
    assert!(!format!("{:?}", registry.source("private:1", basic("secret"))).contains("secret"));
}

#[test]
fn an_index_of_platforms_is_resolved() {
    let d = TestDir::new();
    let store = d.store();
    let registry = Registry::start(&d, false);
    let mut whole = Layout { blobs: Vec::new(), index: json!({"schemaVersion": 2, "manifests": []}) };
    for arch in ["arm64", "amd64"] {
        let layer = tar(&[file("arch", arch)]);
        let mut c = config(std::slice::from_ref(&layer));
        c["architecture"] = arch.into();
        let one = Layout::image(&c, &[("", layer)]);
        let mut entry = one.index["manifests"][0].clone();
        entry["platform"] = json!({"os": "linux", "architecture": arch});
        whole.index["manifests"].as_array_mut().unwrap().push(entry);
        whole.blobs.extend(one.blobs);
    }
    whole.index["mediaType"] = "application/vnd.oci.image.index.v1+json".into();
    let inner = whole.index.to_string().into_bytes();
    whole.index = json!({"schemaVersion": 2, "manifests": [
        {"mediaType": "application/vnd.oci.image.index.v1+json", "digest": Digest::of(&inner), "size": inner.len()}]});
    whole.blobs.push(inner);
    whole.write(&d.join("multi"));
    registry.push(&format!("oci:{}", d.join("multi").display()), "multi:1", &["--all"]);
    let source = registry.source("multi:1", RegistryAuth::Anonymous);
    let image = import(&store, &source, &options()).unwrap();
    assert_eq!(
        (image.platform.as_str(), merged(&d, &store, &image).tree()["arch"].data.as_slice()),
        ("linux/amd64", &b"amd64"[..])
    );
    let mut other = options();
    other.platform = "linux/s390x".to_owned();
    assert!(matches!(import(&store, &source, &other).unwrap_err(), ImportError::NoPlatform { .. }));
}

#[test]
fn plain_http_is_for_loopback_and_named_hosts() {
    let d = TestDir::new();
    let store = d.store();
    let source = |reference: &str| ImageSource::Registry {
        reference: reference.to_owned(),
        auth: RegistryAuth::Anonymous,
        plain_http: true,
    };
    for reference in ["registry.invalid/a:1", "UPPER/case", ""] {
        assert_eq!(import(&store, &source(reference), &options()).unwrap_err().kind(), ErrorKind::InvalidRequest);
    }
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = import(&store, &source(&format!("{closed}/a:1")), &options()).unwrap_err();
    assert!(matches!(error, ImportError::Registry { .. }) && error.kind().is_retryable(), "{error:?}");
}

/// A registry of canned answers: path → body. What it does not know is 404.
struct Canned {
    port: u16,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
    /// Most requests for blobs answered at the same time.
    most: Arc<AtomicUsize>,
}

#[derive(Clone, Copy, PartialEq)]
enum Habit {
    Honest,
    /// Sends half of each blob after the first, then hangs up, once.
    BreaksOff,
    /// Sends half of each layer and then nothing.
    Stalls,
}

impl Canned {
    fn start(answers: Vec<(String, Vec<u8>)>, habit: Habit) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (stop, most, now) =
            (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let broken = Arc::new(Mutex::new(std::collections::HashSet::new()));
        let (stopped, peak, answers) = (Arc::clone(&stop), Arc::clone(&most), Arc::new(answers));
        let thread = std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let (answers, broken, stopped) = (Arc::clone(&answers), Arc::clone(&broken), Arc::clone(&stopped));
                let (now, peak) = (Arc::clone(&now), Arc::clone(&peak));
                std::thread::spawn(move || {
                    let mut line = String::new();
                    let mut reader = BufReader::new(stream.try_clone().unwrap());
                    reader.read_line(&mut line).ok();
                    let mut rest = String::new();
                    while reader.read_line(&mut rest).is_ok_and(|n| n > 2) {
                        rest.clear();
                    }
                    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
                    let Some((_, body)) = answers.iter().find(|(p, _)| *p == path) else {
                        let code = if path == "/v2/" { "200 OK" } else { "404 Not Found" };
                        write!(stream, "HTTP/1.1 {code}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}").ok();
                        return;
                    };
                    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len())
                        .ok();
                    let layer = path.contains("/blobs/") && body.len() > 1024;
                    if !layer {
                        stream.write_all(body).ok();
                        return;
                    }
                    peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    stream.write_all(&body[..body.len() / 2]).ok();
                    stream.flush().ok();
                    std::thread::sleep(Duration::from_millis(60));
                    while habit == Habit::Stalls && !stopped.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    let breaks = habit == Habit::BreaksOff && broken.lock().unwrap().insert(path);
                    now.fetch_sub(1, Ordering::SeqCst);
                    if !breaks {
                        stream.write_all(&body[body.len() / 2..]).ok();
                    }
                });
            }
        });
        Self { port, stop, thread: Some(thread), most }
    }

    /// Serves an image; `twist` may replace what is answered for a layer.
    fn image(layers: &[Vec<u8>], habit: Habit, twist: impl Fn(&[u8]) -> Vec<u8>) -> Self {
        let c = config(layers).to_string().into_bytes();
        let described = |kind: &str, b: &[u8]| json!({"mediaType": kind, "digest": Digest::of(b), "size": b.len()});
        let manifest = json!({
            "schemaVersion": 2,
            "config": described("application/vnd.oci.image.config.v1+json", &c),
            "layers": layers.iter().map(|l| described(common::images::OCI_LAYER, l)).collect::<Vec<_>>(),
        });
        let mut answers = vec![("/v2/a/manifests/1".to_owned(), manifest.to_string().into_bytes())];
        answers.push((format!("/v2/a/blobs/{}", Digest::of(&c)), c));
        answers.extend(layers.iter().map(|l| (format!("/v2/a/blobs/{}", Digest::of(l)), twist(l))));
        Self::start(answers, habit)
    }

    fn source(&self) -> ImageSource {
        let reference = format!("127.0.0.1:{}/a:1", self.port);
        ImageSource::Registry { reference, auth: RegistryAuth::Anonymous, plain_http: true }
    }
}

impl Drop for Canned {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        drop(TcpStream::connect(("127.0.0.1", self.port)));
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("canned registry panicked");
        }
    }
}

fn several() -> Vec<Vec<u8>> {
    (0..8u8).map(|n| tar(&[file(format!("f{n}"), [n; 3000])])).collect::<Vec<Vec<u8>>>()
}

#[test]
fn at_most_three_layers_are_fetched_at_once_and_broken_transfers_begun_anew() {
    let d = TestDir::new();
    let store = d.store();
    for habit in [Habit::Honest, Habit::BreaksOff] {
        let registry = Canned::image(&several(), habit, <[u8]>::to_vec);
        let image = import(&store, &registry.source(), &no_collapse()).unwrap();
        assert_eq!(image.layers.len(), 8);
        store.unmount_all().unwrap();
        image.layers.iter().for_each(|l| store.delete(&l.digest, &|_| false).unwrap());
        assert_eq!(registry.most.load(Ordering::SeqCst), 3);
    }
}

#[test]
fn lying_registries_are_caught() {
    let d = TestDir::new();
    let store = d.store();
    let before = store_files(&d);
    type Twist = fn(&[u8]) -> Vec<u8>;
    let flip: Twist = |l| {
        let mut l = l.to_vec();
        l[600] ^= 1;
        l
    };
    let longer: Twist = |l| [l, &[0; 512]].concat();
    let shorter: Twist = |l| l[..l.len() - 512].to_vec();
    for (twist, digest) in [(flip, true), (longer, false), (shorter, true)] {
        let registry = Canned::image(&several(), Habit::Honest, twist);
        let error = import(&store, &registry.source(), &options()).unwrap_err();
        let fits = if digest {
            matches!(error, ImportError::DigestMismatch { .. })
        } else {
            matches!(error, ImportError::SizeMismatch { .. })
        };
        assert!(fits, "{error:?}");
        assert_eq!(store_files(&d), before);
    }
    for body in ["", "{", "[]", "<html>"] {
        let registry = Canned::start(vec![("/v2/a/manifests/1".to_owned(), body.as_bytes().to_vec())], Habit::Honest);
        let error = import(&store, &registry.source(), &options()).unwrap_err();
        assert!(matches!(error, ImportError::Manifest { .. }), "{body}: {error:?}");
    }
    let nothing = Canned::image(&[], Habit::Honest, <[u8]>::to_vec);
    assert!(matches!(import(&store, &nothing.source(), &options()).unwrap_err(), ImportError::NoLayers { .. }));
    assert_eq!(store_files(&d), before);
}

#[test]
fn a_stalled_fetch_can_be_cancelled() {
    let d = TestDir::new();
    let store = d.store();
    let before = store_files(&d);
    let registry = Canned::image(&several(), Habit::Stalls, <[u8]>::to_vec);
    let cancel = CancelFlag::new();
    let error = std::thread::scope(|s| {
        let import = s.spawn(|| store.import_image(&registry.source(), &options(), &cancel, &|_| {}).unwrap_err());
        while registry.most.load(Ordering::SeqCst) < 3 {
            std::thread::sleep(Duration::from_millis(5));
        }
        let asked = Instant::now();
        cancel.cancel();
        let error = import.join().unwrap();
        assert!(asked.elapsed() < Duration::from_secs(5));
        error
    });
    assert!(matches!(error, ImportError::Cancelled), "{error:?}");
    assert_eq!(store_files(&d), before);
}
