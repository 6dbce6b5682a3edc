//! The walk over a tree: depth first, names sorted, down by name and up by `..`, so that depth does not matter.

use crate::config::CancelFlag;
use crate::error::ImportError;
use crate::stage::OPAQUE;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

/// Attributes that overlayfs keeps for itself, which mean nothing in a lower layer.
const OVERLAYS_OWN: [&[u8]; 4] =
    [b"trusted.overlay.origin", b"trusted.overlay.impure", b"trusted.overlay.uuid", b"trusted.overlay.nlink"];
/// Prefixes that a layer can hold.
const STORED: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"system.posix_acl_"];

/// So many names are announced at once.
const AHEAD: usize = 64;

/// An extended attribute: name and value.
pub(crate) type Xattr = (Vec<u8>, Vec<u8>);

/// Who is told what a walk meets.
pub(crate) trait Visitor {
    /// Whether an entry is to be met, with all below it. The path is below the top.
    fn wants(&mut self, path: &[u8]) -> bool;

    /// A directory, before what is in it. The top comes first, with an empty path.
    fn enter(&mut self, entry: &Entry<'_>) -> Result<(), ImportError>;

    /// Anything but a directory.
    fn leaf(&mut self, entry: &Entry<'_>) -> Result<(), ImportError>;

    /// The directory that was entered last and not left yet, after what is in it.
    fn leave(&mut self);

    /// What comes soon in a directory, the last of it first, so that its reading can begin.
    fn ahead(&mut self, _dir: &OwnedFd, _names: &[CString]) {}
}

/// Something in a tree.
pub(crate) struct Entry<'a> {
    top: &'a Path,
    /// The directory that it lies in; of a directory, itself.
    dir: &'a OwnedFd,
    /// Its name there; of a directory, `.`.
    name: &'a CStr,
    /// Its path below the top.
    pub(crate) path: &'a [u8],
    pub(crate) stat: &'a Stat,
}

impl Entry<'_> {
    /// An error at this place.
    pub(crate) fn failed(&self, e: impl Into<std::io::Error>) -> ImportError {
        failed_at(self.top, self.path, e)
    }

    /// Its last name.
    pub(crate) fn file_name(&self) -> &[u8] {
        self.path.rsplit(|b| *b == b'/').next().unwrap_or_default()
    }

    /// Opens a regular file.
    pub(crate) fn open(&self) -> Result<File, ImportError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(self.dir, self.name, flags, Mode::empty()).map_err(|e| self.failed(e))?.into())
    }

    /// Where a symbolic link leads.
    pub(crate) fn target(&self) -> Result<Vec<u8>, ImportError> {
        Ok(rustix::fs::readlinkat(self.dir, self.name, Vec::new()).map_err(|e| self.failed(e))?.into_bytes())
    }

    /// The attributes that a layer can hold.
    pub(crate) fn xattrs(&self) -> Result<Vec<Xattr>, ImportError> {
        // By a path through the directory's descriptor: there are no calls that take both.
        let mut path = format!("/proc/self/fd/{}/", self.dir.as_fd().as_raw_fd()).into_bytes();
        path.extend(self.name.to_bytes());
        xattrs_of(&path).map_err(|e| self.failed(e))
    }

    /// Whether it stands for the absence of what lower layers have there.
    pub(crate) fn is_whiteout(&self) -> bool {
        FileType::from_raw_mode(self.stat.st_mode) == FileType::CharacterDevice && self.stat.st_rdev == 0
    }
}

/// Whether a directory of these attributes hides what lower layers have in it.
pub(crate) fn is_opaque(xattrs: &[Xattr]) -> bool {
    xattrs.iter().any(|(name, _)| name == OPAQUE.as_bytes())
}

/// A directory on the way.
struct Level {
    identity: (u64, u64),
    /// Names still to visit, last first.
    names: Vec<CString>,
    /// So many of them were not announced yet.
    announced: usize,
    /// Length of its path below the top.
    path_len: usize,
}

/// Walks the tree at `top`, which must not change meanwhile.
pub(crate) fn walk(top: &Path, visitor: &mut impl Visitor, cancel: &CancelFlag) -> Result<(), ImportError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut path = Vec::new();
    let mut dir = rustix::fs::open(top, flags, Mode::empty()).map_err(|e| failed_at(top, &path, e))?;
    let mut levels = vec![enter(top, &dir, &path, visitor)?];
    while let Some(current) = levels.last_mut() {
        if cancel.is_cancelled() {
            return Err(ImportError::Cancelled);
        }
        path.truncate(current.path_len);
        if current.announced > 0 && current.names.len() <= current.announced + AHEAD / 2 {
            let next = current.announced.saturating_sub(AHEAD);
            visitor.ahead(&dir, &current.names[next..current.announced]);
            current.announced = next;
        }
        let Some(name) = current.names.pop() else {
            levels.pop();
            visitor.leave();
            if let Some(parent) = levels.last() {
                dir = open_parent(&dir, parent.identity).map_err(|e| failed_at(top, &path, e))?;
            }
            continue;
        };
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name.to_bytes());
        if !visitor.wants(&path) {
            continue;
        }
        let failed = |e: Errno| failed_at(top, &path, e);
        let stat = rustix::fs::statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            dir = rustix::fs::openat(&dir, &name, flags | OFlags::NOFOLLOW, Mode::empty()).map_err(failed)?;
            levels.push(enter(top, &dir, &path, visitor)?);
        } else {
            visitor.leaf(&Entry { top, dir: &dir, name: &name, path: &path, stat: &stat })?;
        }
    }
    Ok(())
}

fn failed_at(top: &Path, path: &[u8], e: impl Into<std::io::Error>) -> ImportError {
    ImportError::io("read", top.join(String::from_utf8_lossy(path).into_owned()), e)
}

fn enter(top: &Path, dir: &OwnedFd, path: &[u8], visitor: &mut impl Visitor) -> Result<Level, ImportError> {
    let failed = |e: Errno| failed_at(top, path, e);
    let stat = rustix::fs::fstat(dir).map_err(failed)?;
    let mut names = Vec::new();
    for entry in Dir::read_from(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            names.push(entry.file_name().to_owned());
        }
    }
    names.sort_unstable_by(|a, b| b.cmp(a));
    visitor.enter(&Entry { top, dir, name: c".", path, stat: &stat })?;
    Ok(Level { identity: (stat.st_dev, stat.st_ino), announced: names.len(), names, path_len: path.len() })
}

/// Goes up, and makes sure that it is where the walk came from.
fn open_parent(dir: &OwnedFd, expected: (u64, u64)) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let parent = rustix::fs::openat(dir, "..", flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&parent)?;
    // ESTALE: the tree was changed meanwhile.
    if (stat.st_dev, stat.st_ino) == expected { Ok(parent) } else { Err(Errno::STALE) }
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
