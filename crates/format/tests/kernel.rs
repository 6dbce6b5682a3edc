//! Images as the kernel reads them: mounted from files, compared with what was written. Needs root.
#![allow(missing_docs, clippy::unwrap_used)]

use corral_format::erofs::{HOLE, Kind, Meta, Node, NodeId, Tree, write};
use corral_format::{BLOCK, CHUNK};
use std::ffi::CString;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

struct Mounted {
    dir: tempfile::TempDir,
}

impl Mounted {
    fn new(tree: &Tree, data: &[u8]) -> Self {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let image = write(tree, data.len() as u64 / BLOCK).unwrap();
        assert_eq!(image.len() as u64 % BLOCK, 0);
        let (meta, blob, at) = (dir.path().join("meta"), dir.path().join("data"), dir.path().join("at"));
        fs::write(&meta, &image).unwrap();
        fs::write(&blob, data).unwrap();
        fs::create_dir(&at).unwrap();
        let fs_fd = rustix::mount::fsopen("erofs", rustix::mount::FsOpenFlags::FSOPEN_CLOEXEC).unwrap();
        rustix::mount::fsconfig_set_string(&fs_fd, "source", &meta).unwrap();
        rustix::mount::fsconfig_set_string(&fs_fd, "device", &blob).unwrap();
        rustix::mount::fsconfig_create(&fs_fd).unwrap();
        let flags = rustix::mount::FsMountFlags::FSMOUNT_CLOEXEC;
        let mount = rustix::mount::fsmount(&fs_fd, flags, rustix::mount::MountAttrFlags::MOUNT_ATTR_RDONLY).unwrap();
        let attach = rustix::mount::MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(&mount, "", rustix::fs::CWD, &at, attach).unwrap();
        Self { dir }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join("at").join(path)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        rustix::mount::unmount(self.at(""), rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

fn meta(mode: u16) -> Meta {
    Meta { mode, ..Meta::default() }
}

fn dir(tree: &mut Tree, entries: Vec<(&str, NodeId)>) -> NodeId {
    let entries = entries.into_iter().map(|(name, id)| (name.as_bytes().to_vec(), id)).collect();
    tree.add(Node { meta: meta(0o40755), kind: Kind::Directory(entries) })
}

fn link(tree: &mut Tree, target: &str) -> NodeId {
    tree.add(Node { meta: meta(0o120777), kind: Kind::Link(target.as_bytes().to_vec()) })
}

fn xattr(path: &Path, name: &str) -> Vec<u8> {
    let mut space = vec![0; 70_000];
    let n = rustix::fs::lgetxattr(path, CString::new(name).unwrap(), &mut space[..]).unwrap();
    space.truncate(n);
    space
}

/// Puts contents into data as a layer's writer does, and says at which blocks.
fn put(data: &mut Vec<u8>, content: &[u8]) -> Vec<u32> {
    let mut blocks = Vec::new();
    for chunk in content.chunks(CHUNK as usize) {
        if chunk.iter().all(|b| *b == 0) {
            blocks.push(HOLE);
            continue;
        }
        blocks.push((data.len() as u64 / BLOCK) as u32);
        data.extend(chunk);
        data.resize(data.len().next_multiple_of(BLOCK as usize), 0);
    }
    blocks
}

fn file(tree: &mut Tree, data: &mut Vec<u8>, content: &[u8]) -> NodeId {
    let blocks = put(data, content);
    tree.add(Node { meta: meta(0o100644), kind: Kind::File { size: content.len() as u64, blocks } })
}

fn noise(len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed | 1;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as u8
    })
    .take(len)
    .collect()
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: only root mounts");
    }
    root
}

#[test]
fn every_sort_of_file_reads_as_written() {
    if !is_root() {
        return;
    }
    let (mut tree, mut data) = (Tree::new(), Vec::new());
    let mut contents = Vec::new();
    for (n, len) in [0, 1, 4095, 4096, 4097, 131_071, 131_072, 131_073, 500_000].into_iter().enumerate() {
        contents.push((format!("f{n}"), noise(len, n as u32 + 7)));
    }
    let mut sparse = noise(400_000, 3);
    sparse[131_072..262_144].fill(0);
    contents.push(("sparse".to_owned(), sparse));
    contents.push(("zeroes".to_owned(), vec![0; 300_000]));
    let mut entries: Vec<(&str, NodeId)> =
        contents.iter().map(|(name, content)| (name.as_str(), file(&mut tree, &mut data, content))).collect();
    let long = "x".repeat(4095);
    entries.push(("short", link(&mut tree, "f1")));
    entries.push(("long", link(&mut tree, &long)));
    entries.push(("again", entries[4].1));
    let owned = Meta {
        mode: 0o104751,
        uid: 1000,
        gid: 70_000,
        mtime: (-5, 123_456_789),
        xattrs: vec![
            (b"user.b".to_vec(), b"2".to_vec()),
            (b"user.a".to_vec(), vec![7; 5000]),
            (b"trusted.overlay.opaque".to_vec(), b"y".to_vec()),
        ],
    };
    let blocks = put(&mut data, b"owned");
    entries.push(("owned", tree.add(Node { meta: owned, kind: Kind::File { size: 5, blocks } })));
    let special = |tree: &mut Tree, mode, device| tree.add(Node { meta: meta(mode), kind: Kind::Special(device) });
    entries.push(("whiteout", special(&mut tree, 0o020000, 0)));
    entries.push(("pipe", special(&mut tree, 0o010600, 0)));
    let empty = dir(&mut tree, vec![]);
    let below = dir(&mut tree, vec![("empty", empty), ("!before the dot", entries[1].1)]);
    entries.push(("below", below));
    dir(&mut tree, entries);
    let mounted = Mounted::new(&tree, &data);
    for (name, content) in &contents {
        assert_eq!(&fs::read(mounted.at(name)).unwrap(), content, "{name}");
    }
    assert_eq!(fs::read_link(mounted.at("short")).unwrap(), Path::new("f1"));
    assert_eq!(fs::read_link(mounted.at("long")).unwrap(), Path::new(&long));
    let stat = fs::metadata(mounted.at("owned")).unwrap();
    assert_eq!((stat.mode(), stat.uid(), stat.gid(), stat.nlink()), (0o104751, 1000, 70_000, 1));
    assert_eq!((stat.mtime(), stat.mtime_nsec()), (-5, 123_456_789));
    assert_eq!(xattr(&mounted.at("owned"), "user.a"), vec![7; 5000]);
    assert_eq!(xattr(&mounted.at("owned"), "user.b"), b"2");
    assert_eq!(xattr(&mounted.at("owned"), "trusted.overlay.opaque"), b"y");
    let (one, other) = (fs::metadata(mounted.at("f4")).unwrap(), fs::metadata(mounted.at("again")).unwrap());
    assert_eq!((one.ino(), one.nlink()), (other.ino(), 2));
    let whiteout = fs::symlink_metadata(mounted.at("whiteout")).unwrap();
    assert!(whiteout.file_type().is_char_device() && whiteout.rdev() == 0);
    assert!(fs::symlink_metadata(mounted.at("pipe")).unwrap().file_type().is_fifo());
    assert_eq!(fs::metadata(mounted.at("")).unwrap().nlink(), 3);
    assert_eq!(fs::metadata(mounted.at("below")).unwrap().nlink(), 3);
    assert_eq!(fs::read(mounted.at("below/!before the dot")).unwrap(), contents[1].1);
    assert!(fs::read_dir(mounted.at("below/empty")).unwrap().next().is_none());
}

#[test]
fn directories_of_any_size_are_found_by_name_and_listed() {
    if !is_root() {
        return;
    }
    for count in [1_usize, 80, 81, 300, 5000, 20_000] {
        let (mut tree, mut data) = (Tree::new(), Vec::new());
        let one = file(&mut tree, &mut data, b"one");
        let names: Vec<String> =
            (0..count).map(|n| format!("{:x}-{}", n * 7919 % 65_536, "n".repeat(n % 200))).collect();
        dir(&mut tree, names.iter().map(|n| (n.as_str(), one)).collect());
        let mounted = Mounted::new(&tree, &data);
        let mut listed: Vec<String> =
            fs::read_dir(mounted.at("")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        let mut sorted = names.clone();
        listed.sort();
        sorted.sort();
        assert_eq!(listed, sorted, "{count}");
        for name in names.iter().step_by(names.len() / 50 + 1) {
            assert_eq!(fs::read(mounted.at(name)).unwrap(), b"one", "{name}");
        }
        assert!(!mounted.at("no such name").exists());
    }
}

#[test]
fn trees_that_cannot_be_are_refused() {
    use corral_format::erofs::TreeError;
    let with = |names: &[&str]| {
        let mut tree = Tree::new();
        let pipe = tree.add(Node { meta: meta(0o010600), kind: Kind::Special(0) });
        dir(&mut tree, names.iter().map(|n| (*n, pipe)).collect());
        write(&tree, 0)
    };
    for bad in ["", ".", "..", "a/b", "a\0b", &"n".repeat(256)] {
        assert!(matches!(with(&[bad]), Err(TreeError::Name(_))), "{bad:?}");
    }
    assert_eq!(with(&["a", "b", "a"]), Err(TreeError::Twice("a".to_owned())));
    assert!(write(&Tree::new(), 0).is_err());
    let linked = |target: &str| {
        let mut tree = Tree::new();
        let id = link(&mut tree, target);
        dir(&mut tree, vec![("l", id)]);
        write(&tree, 0)
    };
    assert_eq!(linked(""), Err(TreeError::LinkTarget(0)));
    assert_eq!(linked(&"x".repeat(4096)), Err(TreeError::LinkTarget(4096)));
    let attributes = |xattrs: Vec<(Vec<u8>, Vec<u8>)>| {
        let mut tree = Tree::new();
        tree.add(Node { meta: Meta { xattrs, ..meta(0o40755) }, kind: Kind::Directory(vec![]) });
        write(&tree, 0)
    };
    assert!(matches!(attributes(vec![(b"odd.name".to_vec(), vec![])]), Err(TreeError::XattrName(_))));
    assert!(matches!(attributes(vec![(b"user.a".to_vec(), vec![0; 65_536])]), Err(TreeError::Xattrs { .. })));
    let five = (0..5).map(|n| (format!("user.{n}").into_bytes(), vec![0; 60_000])).collect();
    assert!(matches!(attributes(five), Err(TreeError::Xattrs { .. })));
}
