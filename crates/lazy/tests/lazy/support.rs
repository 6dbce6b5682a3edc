//! Layers, mounts and processes for tests. Whatever is made here is taken away again, also when a test hangs.

use corral_format::erofs::{Kind, Meta, Node, NodeId, Tree, write};
use corral_format::manifest::Manifest;
use corral_format::places::{Place, Places};
use corral_format::{BLOCK, CHUNK, presence};
use corral_lazy::LayerId;
use corral_lazy::client::{LazyLink, LinkError};
use corral_lazy::control::{Event, EventLine, EventRecord, LayerStats, Stats, Who};
use corral_lazy::options::Options;
use corral_lazy::server::{Config, Server, Source};
use corral_store::{Faults, Faulty, PosixConfig, PosixStore};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

pub type Files = BTreeMap<String, Vec<u8>>;

/// What a hanging test leaves: mount points and processes.
static LEFT: Mutex<(Vec<PathBuf>, Vec<i32>)> = Mutex::new((Vec::new(), Vec::new()));

fn detach(at: &Path) {
    rustix::mount::unmount(at, rustix::mount::UnmountFlags::DETACH).unwrap_or(());
}

/// Runs a test as root, within a time.
pub fn within(seconds: u64, test: impl FnOnce() + Send + 'static) {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root mounts");
        return;
    }
    let (tell, told) = mpsc::channel();
    let name = std::thread::current().name().unwrap_or("test").to_owned();
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        test();
        tell.send(()).unwrap();
    });
    let thread = thread.unwrap();
    match told.recv_timeout(Duration::from_secs(seconds)) {
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
        Err(mpsc::RecvTimeoutError::Timeout) => {
            eprintln!("{:?} hangs", std::thread::current().name());
            let (mounts, pids) = &*LEFT.lock().unwrap();
            for pid in pids {
                corral_sys::process::kill(*pid, libc::SIGTERM).unwrap_or(());
                // One that is stopped hears that only when it goes on.
                corral_sys::process::kill(*pid, libc::SIGCONT).unwrap_or(());
            }
            for at in mounts.iter().rev() {
                detach(at);
            }
            std::process::exit(1);
        }
    }
}

/// Waits until something is so.
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !so() {
        assert!(Instant::now() < end, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend(state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Files of all sorts of sizes, of so many MiB together: half of them compressible.
pub fn files(mib: usize, seed: u64) -> Files {
    let mut files = Files::new();
    let mut left = mib << 20;
    let sizes = [5_000_000, 131_072, 1, 4096, 700_001, 131_073, 12_345, 262_144, 2_000_000, 40_000];
    for n in 0.. {
        let size = sizes[n % sizes.len()].min(left);
        left -= size;
        let mut content = noise(size, seed * 1000 + n as u64);
        if n % 2 == 0 {
            content.iter_mut().for_each(|b| *b &= 3);
        }
        files.insert(format!("f{n:03}"), content);
        if left == 0 {
            return files;
        }
    }
    unreachable!()
}

/// A store and a node's root, in a directory of their own.
pub struct Site {
    pub dir: tempfile::TempDir,
}

pub struct Layer {
    pub id: LayerId,
    pub manifest: Manifest,
    pub places: Places,
    pub files: Files,
    pub dir: PathBuf,
}

impl Site {
    pub fn new() -> Self {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        fs::create_dir_all(dir.path().join("root/layers")).unwrap();
        fs::create_dir_all(dir.path().join("store")).unwrap();
        Self { dir }
    }

    pub fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    pub fn store(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    /// Publishes a layer, and puts it on the node with no data.
    pub fn layer(&self, files: Files) -> Layer {
        let (mut tree, mut chunks, mut data_len) = (Tree::new(), Vec::new(), 0);
        let meta = |mode| Meta { mode, ..Meta::default() };
        let mut entries: Vec<(Vec<u8>, NodeId)> = Vec::new();
        for (name, content) in &files {
            let mut blocks = Vec::new();
            for chunk in content.chunks(CHUNK as usize) {
                blocks.push((data_len / BLOCK) as u32);
                data_len += (chunk.len() as u64).next_multiple_of(BLOCK);
                chunks.push(chunk.to_vec());
            }
            let kind = Kind::File { size: content.len() as u64, blocks };
            entries.push((name.as_bytes().to_vec(), tree.add(Node { meta: meta(0o100_644), kind })));
        }
        tree.add(Node { meta: meta(0o040_755), kind: Kind::Directory(entries) });
        let image = write(&tree, data_len / BLOCK).unwrap();
        let manifest =
            Manifest::new(&image, chunks.iter().map(|c| (c.len() as u32, *blake3::hash(c).as_bytes()))).unwrap();
        let mut places = Places::default();
        // Packs of a few MiB, so that runs cross none of their ends.
        for part in chunks.chunks(50) {
            let mut pack = Vec::new();
            for chunk in part {
                let frame = zstd::bulk::compress(chunk, 1).unwrap();
                let stored = if frame.len() < chunk.len() { &frame } else { chunk };
                let place =
                    Place { pack: places.packs.len() as u32, offset: pack.len() as u64, stored: stored.len() as u32 };
                places.chunks.push(place);
                pack.extend(stored);
            }
            let name = blake3::hash(&pack);
            let hex = name.to_string();
            fs::create_dir_all(self.store().join("packs").join(&hex[..2])).unwrap();
            fs::write(self.store().join("packs").join(&hex[..2]).join(&hex), pack).unwrap();
            places.packs.push(*name.as_bytes());
        }
        let hex = manifest.digest().hex();
        let published = self.store().join("layers").join(&hex);
        fs::create_dir_all(&published).unwrap();
        fs::write(published.join("places"), places.pack()).unwrap();
        fs::write(published.join("manifest"), manifest.encode()).unwrap();
        let dir = self.root().join("layers").join(&hex);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("manifest"), manifest.encode()).unwrap();
        fs::write(dir.join("meta"), image).unwrap();
        fs::write(dir.join("places"), places.encode()).unwrap();
        let layer = Layer { id: hex.parse().unwrap(), manifest, places, files, dir };
        layer.empty();
        layer
    }

    pub fn pack_path(&self, layer: &Layer, chunk: usize) -> PathBuf {
        let name = layer.places.packs[layer.places.chunks[chunk].pack as usize];
        let hex = name.iter().map(|b| format!("{b:02x}")).collect::<String>();
        self.store().join("packs").join(&hex[..2]).join(hex)
    }
}

impl Layer {
    /// Has no data here.
    pub fn empty(&self) {
        let data = fs::File::create(self.dir.join("data")).unwrap();
        data.set_len(self.manifest.data_len).unwrap();
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let mut map = presence::header(&boot).to_vec();
        map.resize(map.len() + self.manifest.chunks.len(), 0);
        fs::write(self.dir.join("present"), map).unwrap();
    }

    /// The content of the data.
    pub fn data(&self) -> Vec<u8> {
        let mut data = vec![0; self.manifest.data_len as usize];
        let contents = self.files.values().flat_map(|c| c.chunks(CHUNK as usize));
        for (chunk, content) in self.manifest.chunks.iter().zip(contents) {
            data[chunk.offset as usize..][..content.len()].copy_from_slice(content);
        }
        data
    }

    /// Has all data here.
    pub fn fill(&self, present: &[u8]) {
        fs::write(self.dir.join("data"), self.data()).unwrap();
        fs::write(self.dir.join("present"), present).unwrap();
    }

    /// Where a chunk begins in the data.
    pub fn offset(&self, chunk: usize) -> u64 {
        self.manifest.chunks[chunk].offset
    }

    /// The number of the first chunk of a file.
    pub fn chunk_of(&self, file: &str) -> usize {
        self.files.range(..file.to_owned()).map(|(_, c)| c.len().div_ceil(CHUNK as usize)).sum()
    }
}

/// A layer's EROFS, mounted.
pub struct Mounted {
    pub at: PathBuf,
}

impl Mounted {
    pub fn new(site: &Site, layer: &Layer, lazy: bool) -> Self {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let at = site.dir.path().join(format!("at{number}"));
        fs::create_dir(&at).unwrap();
        let fs_fd = rustix::mount::fsopen("erofs", rustix::mount::FsOpenFlags::FSOPEN_CLOEXEC).unwrap();
        let device = if lazy { site.root().join("lazy").join(layer.id.hex()) } else { layer.dir.join("data") };
        rustix::mount::fsconfig_set_string(&fs_fd, "source", layer.dir.join("meta")).unwrap();
        rustix::mount::fsconfig_set_string(&fs_fd, "device", device).unwrap();
        rustix::mount::fsconfig_set_flag(&fs_fd, "directio").unwrap();
        rustix::mount::fsconfig_set_flag(&fs_fd, "ro").unwrap();
        rustix::mount::fsconfig_create(&fs_fd).unwrap();
        let flags = rustix::mount::FsMountFlags::FSMOUNT_CLOEXEC;
        let mount = rustix::mount::fsmount(&fs_fd, flags, rustix::mount::MountAttrFlags::MOUNT_ATTR_RDONLY).unwrap();
        let attach = rustix::mount::MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(&mount, "", rustix::fs::CWD, &at, attach).unwrap();
        LEFT.lock().unwrap().0.push(at.clone());
        Self { at }
    }

    /// Compares the whole tree with what it should be.
    pub fn check(&self, layer: &Layer) {
        let listed = fs::read_dir(&self.at).unwrap().count();
        assert_eq!(listed, layer.files.len());
        for (name, content) in &layer.files {
            let read = fs::read(self.at.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(read == *content, "{name} differs");
        }
    }

    pub fn read(&self, name: &str) -> std::io::Result<Vec<u8>> {
        fs::read(self.at.join(name))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        detach(&self.at);
    }
}

/// A server in this process, before a store that goes wrong as it is told.
pub struct Inside {
    pub root: PathBuf,
    pub faults: Faults,
    pub socket: PathBuf,
    server: Option<Server>,
}

/// Settings that bring chunks when they are read, and no others.
pub fn only_what_is_read(config: &mut Config) {
    (config.ahead_bytes, config.around_bytes) = (0, 0);
}

impl Inside {
    pub fn start(site: &Site, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::new(site.root());
        change(&mut config);
        let root = config.root.clone();
        let faults = Faults::seeded(7);
        let store = PosixStore::open(PosixConfig::new(site.store())).unwrap();
        let store = Arc::new(Faulty::new(store, faults.clone()));
        let device = corral_lazy::holder::mount(&root).unwrap();
        LEFT.lock().unwrap().0.push(root.join("lazy"));
        let server = Server::start(config, Source::of(store), device).unwrap();
        let socket = site.dir.path().join("inside.sock");
        fs::remove_file(&socket).unwrap_or(());
        server.listen(std::os::unix::net::UnixListener::bind(&socket).unwrap()).unwrap();
        Self { root, faults, socket, server: Some(server) }
    }

    pub fn stats(&self) -> Stats {
        client(&self.socket, async |link| link.stats().await.unwrap())
    }

    /// The layer's file as the kernel gives it.
    pub fn file(&self, layer: &Layer) -> fs::File {
        fs::File::open(self.root.join("lazy").join(layer.id.hex())).unwrap()
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        corral_lazy::holder::unmount(&self.root);
        if let Some(server) = self.server.take() {
            // A panic of the test goes before what is still open.
            if !std::thread::panicking() {
                server.wait();
                assert_no_mount(&self.root.join("lazy"));
            }
        }
    }
}

pub fn client<T>(socket: &Path, ask: impl AsyncFnOnce(&mut LazyLink) -> T) -> T {
    try_client(socket, async |link| Ok(ask(link).await)).unwrap()
}

/// Asks a server that may end meanwhile.
pub fn try_client<T>(
    socket: &Path,
    ask: impl AsyncFnOnce(&mut LazyLink) -> Result<T, LinkError>,
) -> Result<T, LinkError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut link = LazyLink::connect(socket).await?;
        ask(&mut link).await
    })
}

pub fn assert_no_mount(root: &Path) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(&root.display().to_string()), "a mount is left");
}

pub fn is_there(pid: i32) -> bool {
    // A child of this process that was not waited for is no process any more.
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// A holder with its server, as programs.
pub struct Held {
    pub options: Options,
    child: Child,
}

pub fn program() -> PathBuf {
    env!("CARGO_BIN_EXE_corral-lazy").into()
}

impl Held {
    pub fn start(site: &Site, change: impl FnOnce(&mut Options)) -> Self {
        Self::start_in(site, &[], change)
    }

    /// With variables in its environment.
    pub fn start_in(site: &Site, variables: &[(&str, &str)], change: impl FnOnce(&mut Options)) -> Self {
        let store = format!("file://{}", site.store().display());
        let mut options = Options::new(site.root(), store, site.dir.path().join("c.sock"));
        change(&mut options);
        let mut command = Command::new(program());
        command.arg("hold").args(options.words()).envs(variables.iter().copied()).stdin(Stdio::null());
        let child = command.spawn().unwrap();
        LEFT.lock().unwrap().1.push(child.id() as i32);
        LEFT.lock().unwrap().0.push(site.root().join("lazy"));
        let held = Self { options, child };
        until("a holder that answers", || held.try_who().is_some());
        held
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn try_who(&self) -> Option<Who> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let ask = async { LazyLink::connect(&self.options.socket).await.ok()?.who().await.ok() };
            tokio::time::timeout(Duration::from_secs(5), ask).await.ok()?
        })
    }

    pub fn who(&self) -> Who {
        let mut who = None;
        until("an answer", || {
            who = self.try_who();
            who.is_some()
        });
        who.unwrap()
    }

    /// Ends the server, as a crash would.
    pub fn kill_server(&self) -> i32 {
        let pid = self.who().server_pid;
        corral_sys::process::kill(pid, libc::SIGKILL).unwrap_or(());
        pid
    }

    /// Waits for the end of a holder that something else ends.
    pub fn gone(mut self) -> std::process::ExitStatus {
        self.child.wait().unwrap()
    }

    /// Ends the holder as an operator would, and looks at what is left.
    pub fn end(mut self) {
        let who = self.who();
        corral_sys::process::kill(who.holder_pid, libc::SIGTERM).unwrap();
        until("the holder's end", || {
            let ours = self.child.try_wait().unwrap().is_some();
            (ours || who.holder_pid != self.pid()) && !is_there(who.holder_pid)
        });
        assert!(!is_there(who.server_pid), "the server is left");
        assert!(!self.options.socket.exists(), "the socket is left");
        assert_no_mount(&self.options.server.root.join("lazy"));
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if std::thread::panicking() {
            corral_sys::process::kill(self.pid(), libc::SIGTERM).unwrap_or(());
            self.child.wait().map(|_| ()).unwrap_or(());
            detach(&self.options.server.root.join("lazy"));
        }
    }
}

/// Reads part of a layer's data past all caches but the server's.
pub fn read_direct(file: &fs::File, offset: u64, length: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

/// Counters of a layer.
pub fn of(inside: &Inside, layer: &Layer) -> LayerStats {
    let stats = inside.stats();
    stats.layers.into_iter().find(|l| l.layer == layer.id).expect("the layer")
}

/// Events until one is as wished.
pub fn events_until(socket: &Path, wished: impl Fn(&Event) -> bool) -> Vec<EventRecord> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut events = LazyLink::connect(socket).await.unwrap().events(None).await.unwrap();
        let mut seen = Vec::new();
        let end = tokio::time::Instant::now() + Duration::from_secs(20);
        loop {
            let line = tokio::time::timeout_at(end, events.next()).await.expect("an event in time").unwrap();
            if let EventLine::Event(record) = line {
                let found = wished(&record.event);
                seen.push(record);
                if found {
                    return seen;
                }
            }
        }
    })
}
