//! Shared by the integration tests: directories that clean up after themselves, a tar writer that can also write what no
//! sane tar holds, image makers, and snapshots of mounted trees.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

pub mod images;
pub mod tarball;

use corral_api::image::ImageRecord;
use corral_layers::{CancelFlag, ImageSource, ImportError, ImportOptions, LayerStore, LayersConfig};
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A directory on the real file system, unmounted and removed on drop, also when a test panics.
pub struct TestDir(PathBuf);

impl TestDir {
    pub fn new() -> Self {
        assert!(rustix::process::geteuid().is_root(), "these tests mount and chown: run them as root");
        assert!(which("mount"), "mount is not installed");
        let dir = tempfile::Builder::new().prefix("layers-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self(dir.keep())
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    pub fn store(&self) -> LayerStore {
        LayerStore::open(self.join("store"), LayersConfig::default()).unwrap()
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let info = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points = info.lines().filter_map(|l| l.split(' ').nth(4)).filter(|p| Path::new(p).starts_with(&self.0));
        for point in points.collect::<Vec<_>>().into_iter().rev() {
            if let Err(e) = rustix::mount::unmount(point, rustix::mount::UnmountFlags::DETACH) {
                eprintln!("{point}: {e}");
            }
        }
        if let Err(e) = std::fs::remove_dir_all(&self.0) {
            eprintln!("{}: {e}", self.0.display());
        }
    }
}

pub fn which(tool: &str) -> bool {
    std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).any(|dir| dir.join(tool).exists())
}

/// Runs a command with a bound on its time; fails the test unless it succeeds.
pub fn run(command: &mut Command) -> Output {
    let text = format!("{command:?}");
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap_or_else(|e| panic!("{text}: {e}"));
    let end = Instant::now() + Duration::from_secs(60);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("{text}: did not end within a minute");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success(), "{text}: {}", String::from_utf8_lossy(&out.stderr));
    out
}

pub fn options() -> ImportOptions {
    ImportOptions::named("test")
}

/// Every layer a run of its own.
pub fn no_collapse() -> ImportOptions {
    ImportOptions { run_bytes: 1, ..options() }
}

pub fn import(store: &LayerStore, source: &ImageSource, options: &ImportOptions) -> Result<ImageRecord, ImportError> {
    store.import_image(source, options, &CancelFlag::new(), &|_| {})
}

/// The merged view of an image's layers, unmounted on drop.
pub struct Merged {
    path: PathBuf,
    mounted: bool,
}

impl Merged {
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn tree(&self) -> Tree {
        snapshot(&self.path)
    }
}

impl Drop for Merged {
    fn drop(&mut self) {
        if self.mounted
            && let Err(e) = rustix::mount::unmount(&self.path, rustix::mount::UnmountFlags::DETACH)
        {
            eprintln!("{}: {e}", self.path.display());
        }
    }
}

pub fn merged(dir: &TestDir, store: &LayerStore, image: &ImageRecord) -> Merged {
    use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags};
    use std::os::fd::AsFd;
    if let [only] = image.layers.as_slice() {
        return Merged { path: store.ensure_mounted(&only.digest).unwrap(), mounted: false };
    }
    let fs = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC).unwrap();
    // A detached mount ends with its descriptor: all are held until the overlay is made.
    let lowers: Vec<_> = image.layers.iter().rev().map(|l| store.open_lower(&l.digest).unwrap()).collect();
    for lower in &lowers {
        rustix::mount::fsconfig_set_fd(fs.as_fd(), "lowerdir+", lower.as_fd()).unwrap();
    }
    rustix::mount::fsconfig_create(fs.as_fd()).unwrap();
    let mount = rustix::mount::fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).unwrap();
    let path = tempfile::Builder::new().prefix("merged-").tempdir_in(dir.path()).unwrap().keep();
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(mount.as_fd(), "", rustix::fs::CWD, &path, flags).unwrap();
    Merged { path, mounted: true }
}

/// One entry of a tree, as stat and friends show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub kind: char,
    pub mode: u32,
    pub owner: (u32, u32),
    pub mtime: (i64, i64),
    pub nlink: u64,
    /// Content, or target of a link.
    pub data: Vec<u8>,
    pub xattrs: BTreeMap<String, Vec<u8>>,
}

pub type Tree = BTreeMap<String, Node>;

/// Everything beneath a directory; the root itself is `.`.
pub fn snapshot(root: &Path) -> Tree {
    let mut out = Tree::new();
    let mut todo = vec![root.to_owned()];
    while let Some(path) = todo.pop() {
        let meta = path.symlink_metadata().unwrap();
        let kind = meta.file_type();
        let (kind, data) = if kind.is_dir() {
            todo.extend(std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
            ('d', Vec::new())
        } else if kind.is_symlink() {
            ('l', std::fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec())
        } else if kind.is_file() {
            ('f', std::fs::read(&path).unwrap())
        } else if kind.is_fifo() {
            ('p', Vec::new())
        } else if kind.is_char_device() {
            ('c', meta.rdev().to_string().into_bytes())
        } else {
            ('?', Vec::new())
        };
        let name = path.strip_prefix(root).unwrap().to_str().unwrap_or("?").to_owned();
        let node = Node {
            kind,
            mode: meta.mode() & 0o7777,
            owner: (meta.uid(), meta.gid()),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            nlink: if kind == 'd' { 0 } else { meta.nlink() },
            data,
            xattrs: xattrs(&path),
        };
        out.insert(if name.is_empty() { ".".to_owned() } else { name }, node);
    }
    out
}

pub fn xattrs(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut list = Vec::with_capacity(65536);
    rustix::fs::llistxattr(path, rustix::buffer::spare_capacity(&mut list)).unwrap();
    let mut out = BTreeMap::new();
    for name in list.split(|b| *b == 0).filter(|n| !n.is_empty()) {
        let mut value = Vec::with_capacity(65536);
        rustix::fs::lgetxattr(path, name, rustix::buffer::spare_capacity(&mut value)).unwrap();
        out.insert(String::from_utf8(name.to_vec()).unwrap(), value);
    }
    out
}

/// Names and contents only, for comparisons that leave metadata aside.
pub fn contents(tree: &Tree) -> BTreeMap<String, (char, Vec<u8>)> {
    tree.iter().map(|(name, node)| (name.clone(), (node.kind, node.data.clone()))).collect()
}

pub fn names(tree: &Tree) -> Vec<&str> {
    tree.keys().map(String::as_str).filter(|n| *n != ".").collect()
}

/// Names of all files of a store, to see that nothing stayed behind.
pub fn store_files(dir: &TestDir) -> Vec<String> {
    let mut out: Vec<String> = snapshot(&dir.join("store")).into_keys().collect();
    out.sort();
    out
}
