//! What differs between two stacks of layers.
//!
//! Both are looked at as the kernel merges them. Only what the layers that are not in both bring, or hide, is compared:
//! the rest is the same.

use crate::error::{ImportError, MountError};
use crate::lower::LowerView;
use crate::stage::{OPAQUE, read_full};
use crate::store::LayerStore;
use corral_api::digest::Digest;
use corral_api::image::{Change, DiffEntry, ImageDiff};
use corral_api::text::readable;
use rustix::fs::{Dir, FileType, OFlags, Stat};
use rustix::io::Errno;
use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

struct Diff {
    from: LowerView,
    to: LowerView,
    /// The layers that are not in both, each by itself.
    own: Vec<LowerView>,
    entries: Vec<DiffEntry>,
    limit: usize,
}

impl LayerStore {
    /// Compares two stacks, lowest first. Blocks: it reads what both have at the same place and size.
    ///
    /// # Errors
    /// A layer is not here, or the host refuses.
    pub fn diff(&self, from: &[Digest], to: &[Digest], limit: usize) -> Result<ImageDiff, ImportError> {
        let common: HashSet<&Digest> = from.iter().zip(to).take_while(|(a, b)| a == b).map(|(a, _)| a).collect();
        let open = |digests: &[Digest]| -> Result<LowerView, ImportError> {
            let files = digests.iter().map(|d| self.check(d)).collect::<Result<Vec<_>, _>>()?;
            let nothing = || ImportError::InvalidRequest("a stack without layers".to_owned());
            LowerView::open(&files)?.ok_or_else(nothing)
        };
        let mut own = Vec::new();
        let differing: BTreeSet<&Digest> = from.iter().chain(to).filter(|d| !common.contains(d)).collect();
        for digest in differing {
            own.push(open(std::slice::from_ref(digest))?);
        }
        let mut diff = Diff { from: open(from)?, to: open(to)?, own, entries: Vec::new(), limit };
        let walked = diff.directory(b"", false);
        walked.map_err(|e| MountError::syscall("compare", self.root(), e))?;
        diff.entries.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        let truncated = diff.entries.len() > limit;
        diff.entries.truncate(limit);
        Ok(ImageDiff { entries: diff.entries, truncated })
    }
}

impl Diff {
    /// Compares what lies in a directory. `all` says that everything below may differ.
    fn directory(&mut self, path: &[u8], all: bool) -> io::Result<()> {
        if self.entries.len() > self.limit {
            return Ok(());
        }
        let mut names = names_in(&self.from, path)?;
        names.extend(names_in(&self.to, path)?);
        for name in names {
            let below = if path.is_empty() { name } else { [path, b"/", &name].concat() };
            let touch = if all { Touch::Whole } else { self.touch(&below)? };
            if touch != Touch::None {
                self.entry(&below, touch == Touch::Whole)?;
            }
        }
        Ok(())
    }

    /// Whether layers of one side alone have something at a path, or hide all below it.
    fn touch(&self, path: &[u8]) -> io::Result<Touch> {
        let mut found = Touch::None;
        for layer in &self.own {
            let Some(stat) = layer.stat(path)? else { continue };
            let opaque = is_dir(&stat) && xattr(layer, path, OPAQUE)?.is_some_and(|value| value == b"y");
            if opaque || !is_dir(&stat) {
                return Ok(Touch::Whole);
            }
            found = Touch::Through;
        }
        Ok(found)
    }

    fn entry(&mut self, path: &[u8], all: bool) -> io::Result<()> {
        let (before, after) = (self.from.stat(path)?, self.to.stat(path)?);
        let change = match (&before, &after) {
            (None, None) => return Ok(()),
            (None, Some(_)) => Some(Change::Added),
            (Some(_), None) => Some(Change::Deleted),
            (Some(before), Some(after)) => (!self.same(path, before, after)?).then_some(Change::Changed),
        };
        if let Some(change) = change {
            let (path, path_base64) = readable(&[b"/", path].concat());
            self.entries.push(DiffEntry { path, path_base64, change });
        }
        if before.as_ref().or(after.as_ref()).is_some_and(is_dir) || after.as_ref().is_some_and(is_dir) {
            // Of what is on one side alone everything is.
            let whole = all || change.is_some_and(|c| c != Change::Changed);
            self.directory(path, whole)?;
        }
        Ok(())
    }

    fn same(&self, path: &[u8], before: &Stat, after: &Stat) -> io::Result<bool> {
        let attributes = |s: &Stat| (s.st_mode, s.st_uid, s.st_gid, s.st_mtime, s.st_mtime_nsec, s.st_rdev);
        // Sizes of directories mean nothing; that something was put into one is told by what was put.
        let (mut a, mut b) = (attributes(before), attributes(after));
        if is_dir(before) && is_dir(after) {
            ((a.3, a.4), (b.3, b.4)) = ((0, 0), (0, 0));
        }
        if a != b || (!is_dir(before) && before.st_size != after.st_size) {
            return Ok(false);
        }
        match FileType::from_raw_mode(before.st_mode) {
            FileType::RegularFile => {
                let open = |view: &LowerView| -> io::Result<Option<File>> {
                    Ok(view.open_path(path, OFlags::RDONLY | OFlags::NONBLOCK)?.map(File::from))
                };
                match (open(&self.from)?, open(&self.to)?) {
                    (Some(a), Some(b)) => same_content(a, b),
                    _ => Ok(false),
                }
            }
            FileType::Symlink => Ok(target(&self.from, path)? == target(&self.to, path)?),
            _ => Ok(true),
        }
    }
}

/// What layers of one side alone have to do with a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Touch {
    /// Nothing: it is the same on both sides.
    None,
    /// Something lies below it.
    Through,
    /// It may differ, with all below it.
    Whole,
}

fn is_dir(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

fn names_in(view: &LowerView, path: &[u8]) -> io::Result<BTreeSet<Vec<u8>>> {
    let Some(dir) = view.open_path(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK)? else {
        return Ok(BTreeSet::new());
    };
    let mut names = BTreeSet::new();
    for entry in Dir::read_from(&dir)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.insert(name);
        }
    }
    Ok(names)
}

fn target(view: &LowerView, path: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let Some(link) = view.open_path(path, OFlags::PATH)? else { return Ok(None) };
    Ok(Some(rustix::fs::readlinkat(&link, c"", Vec::new())?.into_bytes()))
}

fn xattr(view: &LowerView, path: &[u8], name: &str) -> io::Result<Option<Vec<u8>>> {
    let Some(fd) = view.open_path(path, OFlags::PATH)? else { return Ok(None) };
    get_xattr(&fd, name)
}

fn get_xattr(fd: &OwnedFd, name: &str) -> io::Result<Option<Vec<u8>>> {
    let mut value = Vec::with_capacity(16);
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    match rustix::fs::getxattr(path, name, rustix::buffer::spare_capacity(&mut value)) {
        Ok(_) => Ok(Some(value)),
        Err(Errno::NODATA | Errno::NOTSUP | Errno::RANGE) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

fn same_content(mut a: File, mut b: File) -> io::Result<bool> {
    let (mut left, mut right) = (vec![0; 256 << 10], vec![0; 256 << 10]);
    loop {
        let n = read_full(&mut a, &mut left)?;
        if n != read_full(&mut b, &mut right)? || left[..n] != right[..n] {
            return Ok(false);
        }
        if n == 0 {
            return Ok(true);
        }
    }
}
