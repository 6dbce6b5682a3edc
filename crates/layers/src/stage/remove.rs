//! Deletions: what a whiteout or a replacement takes away, in the stage and of the layers beneath.

use super::{Dir, OPAQUE, Stage, StageError};
use crate::error::EntryFault;
use crate::paths;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::rc::Rc;

impl Stage {
    /// Applies `.wh.<name>`: deletes what lower source layers put at this path, not what the current one did.
    pub(crate) fn whiteout(&mut self, parent: &[&[u8]], name: &[u8]) -> Result<(), StageError> {
        if name.is_empty() || name == b"." || name == b".." {
            return Err(EntryFault::BadWhiteout.into());
        }
        let Some(dir_path) = self.lookup_dir(parent)? else { return Ok(()) };
        let path = paths::join(&dir_path, name);
        if self.touched.contains(path.as_slice()) {
            return self.clear_untouched(&path);
        }
        let in_lower = match self.lower_at(&dir_path) {
            Some(lower) => lower.stat(&path)?.is_some(),
            None => false,
        };
        if !in_lower {
            if self.stat_stage(&path)?.is_some() {
                let fd = self.open_dir(&dir_path)?;
                self.remove(&fd, &path, name)?;
            }
            return Ok(());
        }
        let dir = self.resolve_parent(parent)?;
        self.remove(&dir.fd, &path, name)?;
        // Overlayfs's whiteout is a character device 0:0 (Documentation/filesystems/overlayfs.rst).
        rustix::fs::mknodat(&*dir.fd, name, FileType::CharacterDevice, Mode::empty(), rustix::fs::makedev(0, 0))?;
        let epoch = Timespec { tv_sec: 0, tv_nsec: 0 };
        let times = Timestamps { last_access: epoch, last_modification: epoch };
        Ok(rustix::fs::utimensat(&*dir.fd, name, &times, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Applies `.wh..wh..opq`: deletes what lower source layers put into this directory.
    pub(crate) fn opaque(&mut self, parts: &[&[u8]]) -> Result<(), StageError> {
        let Some(path) = self.lookup_dir(parts)? else { return Ok(()) };
        let in_stage = self.stat_stage(&path)?.is_some();
        let in_lower = match self.lower_at(&path) {
            Some(lower) => lower.is_dir(&path)?,
            None => false,
        };
        if in_lower && !in_stage {
            self.resolve_parent(parts)?;
        }
        self.clear_untouched(&path)
    }

    /// Removes everything of earlier source layers in a directory and hides what lies beneath it.
    fn clear_untouched(&mut self, path: &[u8]) -> Result<(), StageError> {
        let is_dir = |stat: rustix::fs::Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if !self.stat_stage(path)?.is_some_and(is_dir) {
            return Ok(());
        }
        self.last = None;
        let dir = Dir { fd: self.open_dir(path)?, path: Rc::from(path) };
        for name in names(&dir.fd)? {
            let child = paths::join(path, &name);
            if self.touched.contains(child.as_slice()) {
                self.clear_untouched(&child)?;
            } else {
                self.remove(&dir.fd, &child, &name)?;
            }
        }
        self.make_opaque(&dir)
    }

    /// Marks a directory opaque where something beneath would show through.
    pub(super) fn make_opaque(&mut self, dir: &Dir) -> Result<(), StageError> {
        let shows = match self.lower_at(&dir.path) {
            Some(lower) => lower.is_dir(&dir.path)?,
            None => false,
        };
        if shows {
            rustix::fs::fsetxattr(&*dir.fd, OPAQUE, b"y", XattrFlags::empty())?;
            self.opaque.insert(dir.path.to_vec());
        }
        Ok(())
    }

    /// Removes what is in the way of a new entry.
    pub(super) fn clear_place(&mut self, parent: &Dir, name: &[u8]) -> Result<(), StageError> {
        let path = paths::join(&parent.path, name);
        self.remove(&parent.fd, &path, name)
    }

    /// Removes a file or tree from the stage and everything known about it.
    fn remove(&mut self, parent: &OwnedFd, path: &[u8], name: &[u8]) -> Result<(), StageError> {
        let was_dir = match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
            Ok(()) => false,
            Err(Errno::NOENT) => return Ok(()),
            Err(Errno::ISDIR | Errno::PERM) => {
                remove_tree(parent, name)?;
                true
            }
            Err(e) => return Err(e.into()),
        };
        self.last = None;
        self.touched.remove(path);
        if was_dir {
            self.opaque.remove(path);
            self.dir_times.remove(path);
            // `0` is the byte after `/`: the range holds what lies beneath the path and nothing else.
            let below = [path, b"/"].concat()..[path, b"0"].concat();
            for set in [&mut self.touched, &mut self.opaque] {
                let gone: Vec<_> = set.range(below.clone()).cloned().collect();
                for key in &gone {
                    set.remove(key);
                }
            }
            let gone: Vec<_> = self.dir_times.range(below).map(|(key, _)| key.clone()).collect();
            for key in &gone {
                self.dir_times.remove(key);
            }
        }
        Ok(())
    }
}

/// Names in a directory, read whole so that it may be changed meanwhile.
pub(super) fn names(dir: &OwnedFd) -> Result<Vec<Vec<u8>>, StageError> {
    let mut out = Vec::new();
    for entry in rustix::fs::Dir::read_from(dir)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            out.push(name);
        }
    }
    Ok(out)
}

/// Removes a tree without recursion, so that depth costs descriptors for one level only.
fn remove_tree(parent: &OwnedFd, name: &[u8]) -> Result<(), StageError> {
    let open = |at: &OwnedFd, name: &[u8]| {
        rustix::fs::openat(
            at,
            name,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
    };
    let mut stack = vec![(open(parent, name)?, name.to_vec())];
    while let Some((dir, _)) = stack.last() {
        let mut descend = None;
        for child in names(dir)? {
            match rustix::fs::unlinkat(dir, child.as_slice(), AtFlags::empty()) {
                Ok(()) => {}
                Err(Errno::ISDIR | Errno::PERM) => {
                    descend = Some((open(dir, &child)?, child));
                    break;
                }
                Err(e) => return Err(e.into()),
            }
        }
        if let Some(next) = descend {
            stack.push(next);
            continue;
        }
        let Some((_, done)) = stack.pop() else { break };
        let above = stack.last().map_or(parent, |(dir, _)| dir);
        rustix::fs::unlinkat(above, done.as_slice(), AtFlags::REMOVEDIR)?;
    }
    Ok(())
}
