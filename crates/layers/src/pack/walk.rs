//! The walk over a tree: depth first, names sorted, down by name and up by `..`.

use super::content::Content;
use crate::config::CancelFlag;
use crate::error::ImportError;
use crate::scrub::Scrub;
use crate::stage::OPAQUE;
use corral_format::erofs::{Kind, Meta, Node, NodeId, Tree, Xattr};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

/// Attributes that overlayfs keeps for itself, which mean nothing in a lower layer.
const OVERLAYS_OWN: [&[u8]; 4] =
    [b"trusted.overlay.origin", b"trusted.overlay.impure", b"trusted.overlay.uuid", b"trusted.overlay.nlink"];
/// Prefixes that a layer can hold.
const STORED: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"system.posix_acl_"];

/// A tree that was walked.
pub(super) struct Walked {
    pub(super) tree: Tree,
    pub(super) tally: Tally,
}

/// What a walk met.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Entries below the root.
    pub(crate) entries: u64,
    /// Whiteouts and opaque directories among them.
    pub(crate) deletions: u64,
    /// Paths that were left out: the first of them.
    pub(crate) scrubbed: Vec<String>,
    /// How many were left out.
    pub(crate) scrubbed_count: u64,
}

impl Tally {
    /// Most paths that are named.
    const NAMED: usize = 100;

    fn leave_out(&mut self, path: &[u8]) {
        self.scrubbed_count += 1;
        if self.scrubbed.len() < Self::NAMED {
            self.scrubbed.push(format!("/{}", String::from_utf8_lossy(path)));
        }
    }
}

/// A directory in the making.
struct Level {
    name: CString,
    identity: (u64, u64),
    meta: Meta,
    /// Names still to visit, last first.
    names: Vec<CString>,
    done: Vec<(Vec<u8>, NodeId)>,
    /// Length of its path below the top.
    path_len: usize,
}

struct Walk<'a, 'c> {
    top: &'a Path,
    content: &'a mut Content<'c>,
    tree: Tree,
    /// Files with more than one name.
    linked: HashMap<(u64, u64), NodeId>,
    tally: Tally,
    /// Path of the entry at hand, below the top.
    path: Vec<u8>,
}

/// Walks the tree at `top`.
pub(super) fn walk(
    top: &Path,
    content: &mut Content<'_>,
    scrub: &Scrub,
    cancel: &CancelFlag,
) -> Result<Walked, ImportError> {
    let failed = |e: Errno| ImportError::io("read", top, e);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut dir = rustix::fs::open(top, flags, Mode::empty()).map_err(failed)?;
    let mut walk =
        Walk { top, content, tree: Tree::new(), linked: HashMap::new(), tally: Tally::default(), path: Vec::new() };
    let mut levels = vec![level(&dir, CString::default(), 0).map_err(failed)?];
    loop {
        if cancel.is_cancelled() {
            return Err(ImportError::Cancelled);
        }
        let Some(current) = levels.last_mut() else { return Ok(walk.finish()) };
        let Some(name) = current.names.pop() else {
            let Some(Level { name, meta, done, .. }) = levels.pop() else { return Ok(walk.finish()) };
            let id = walk.tree.add(Node { meta, kind: Kind::Directory(done) });
            let Some(parent) = levels.last_mut() else { return Ok(walk.finish()) };
            parent.done.push((name.into_bytes(), id));
            dir = open_parent(&dir, parent.identity).map_err(|e| walk.failed(&name_of(parent), e))?;
            continue;
        };
        walk.path.truncate(current.path_len);
        if !walk.path.is_empty() {
            walk.path.push(b'/');
        }
        walk.path.extend_from_slice(name.to_bytes());
        if scrub.matches(&walk.path) {
            walk.tally.leave_out(&walk.path);
            continue;
        }
        walk.tally.entries += 1;
        let stat = rustix::fs::statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW).map_err(|e| walk.failed(&name, e))?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            let flags = flags | OFlags::NOFOLLOW;
            dir = rustix::fs::openat(&dir, &name, flags, Mode::empty()).map_err(|e| walk.failed(&name, e))?;
            let below = level(&dir, name.clone(), walk.path.len()).map_err(|e| walk.failed(&name, e))?;
            walk.tally.deletions += u64::from(below.meta.xattrs.iter().any(|(name, _)| name == OPAQUE.as_bytes()));
            levels.push(below);
            continue;
        }
        if let Some(id) = walk.file(&dir, &name, &stat)? {
            current.done.push((name.into_bytes(), id));
        }
    }
}

fn name_of(level: &Level) -> CString {
    level.name.clone()
}

impl Walk<'_, '_> {
    fn finish(self) -> Walked {
        Walked { tree: self.tree, tally: self.tally }
    }

    fn failed(&self, name: &CStr, e: Errno) -> ImportError {
        failed_at(self.top, name, e)
    }

    /// Anything but a directory. Sockets are of no use in a layer.
    fn file(&mut self, dir: &OwnedFd, name: &CStr, stat: &Stat) -> Result<Option<NodeId>, ImportError> {
        let identity = (stat.st_dev, stat.st_ino);
        if stat.st_nlink > 1
            && let Some(id) = self.linked.get(&identity)
        {
            return Ok(Some(*id));
        }
        let top = self.top;
        let at = |e: Errno| failed_at(top, name, e);
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let file = File::from(rustix::fs::openat(dir, name, flags, Mode::empty()).map_err(at)?);
                let size = stat.st_size as u64;
                let blocks = self.content.add(&file, size).map_err(|e| failed_at(top, name, e))?;
                Kind::File { size, blocks }
            }
            FileType::Symlink => Kind::Link(rustix::fs::readlinkat(dir, name, Vec::new()).map_err(at)?.into_bytes()),
            FileType::Socket => return Ok(None),
            FileType::CharacterDevice if stat.st_rdev == 0 => {
                self.tally.deletions += 1;
                Kind::Special(0)
            }
            _ => Kind::Special(encode_device(stat.st_rdev)),
        };
        let meta = Meta { xattrs: xattrs_at(dir, name).map_err(at)?, ..meta_of(stat) };
        let id = self.tree.add(Node { meta, kind });
        if stat.st_nlink > 1 {
            self.linked.insert(identity, id);
        }
        Ok(Some(id))
    }
}

fn failed_at(top: &Path, name: &CStr, e: impl Into<std::io::Error>) -> ImportError {
    ImportError::io("read", top.join(name.to_string_lossy().into_owned()), e)
}

fn level(dir: &OwnedFd, name: CString, path_len: usize) -> Result<Level, Errno> {
    let stat = rustix::fs::fstat(dir)?;
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            names.push(entry.file_name().to_owned());
        }
    }
    names.sort_unstable_by(|a, b| b.cmp(a));
    let meta = Meta { xattrs: xattrs_of(&format!("/proc/self/fd/{}/.", dir.as_raw_fd()))?, ..meta_of(&stat) };
    Ok(Level { name, identity: (stat.st_dev, stat.st_ino), meta, names, done: Vec::new(), path_len })
}

/// Goes up, and makes sure that it is where the walk came from.
fn open_parent(dir: &OwnedFd, expected: (u64, u64)) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let parent = rustix::fs::openat(dir, "..", flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&parent)?;
    // ESTALE: the tree was changed meanwhile.
    if (stat.st_dev, stat.st_ino) == expected { Ok(parent) } else { Err(Errno::STALE) }
}

fn meta_of(stat: &Stat) -> Meta {
    Meta {
        mode: stat.st_mode as u16,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: (stat.st_mtime, stat.st_mtime_nsec as u32),
        xattrs: Vec::new(),
    }
}

/// The kernel's 32-bit encoding of a device number (`new_encode_dev`).
fn encode_device(device: u64) -> u32 {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

fn xattrs_at(dir: &OwnedFd, name: &CStr) -> Result<Vec<Xattr>, Errno> {
    // By a path through the directory's descriptor: there are no calls that take both.
    let mut path = format!("/proc/self/fd/{}/", dir.as_fd().as_raw_fd()).into_bytes();
    path.extend(name.to_bytes());
    xattrs_of(&path)
}

fn xattrs_of(path: &(impl AsRef<[u8]> + ?Sized)) -> Result<Vec<Xattr>, Errno> {
    const MOST: usize = 65_536;
    let path = path.as_ref();
    // Most files have none: a look with a small buffer tells.
    let mut list = Vec::with_capacity(256);
    match rustix::fs::llistxattr(path, rustix::buffer::spare_capacity(&mut list)) {
        Ok(_) => {}
        Err(Errno::NOTSUP) => return Ok(Vec::new()),
        Err(Errno::RANGE) => {
            list = Vec::with_capacity(MOST);
            rustix::fs::llistxattr(path, rustix::buffer::spare_capacity(&mut list))?;
        }
        Err(e) => return Err(e),
    }
    let mut out = Vec::new();
    let wanted = |name: &[u8]| STORED.iter().any(|p| name.starts_with(p)) && !OVERLAYS_OWN.contains(&name);
    for name in list.split(|b| *b == 0).filter(|name| wanted(name)) {
        let mut value = Vec::with_capacity(MOST);
        rustix::fs::lgetxattr(path, name, rustix::buffer::spare_capacity(&mut value))?;
        out.push((name.to_vec(), value));
    }
    Ok(out)
}
