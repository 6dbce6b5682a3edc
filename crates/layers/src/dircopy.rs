//! Copying a directory of the host into a stage, without following a link in it.

use crate::config::CancelFlag;
use crate::error::{EntryFault, ImportError};
use crate::extract::{Budget, write_holes};
use crate::paths;
use crate::stage::{Meta, Stage, StageError, mtime_of, read_xattrs};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Where a directory goes and whose it becomes.
pub(crate) struct DirCopy<'a> {
    pub(crate) source: &'a Path,
    /// Directory of the stage that takes the content; its own metadata is that of the source's root.
    pub(crate) at: &'a [&'a [u8]],
    /// Owner given to everything, where not kept.
    pub(crate) owner: Option<(u32, u32)>,
    pub(crate) cancel: &'a CancelFlag,
}

struct Level {
    dir: OwnedFd,
    path: Vec<Vec<u8>>,
    names: std::vec::IntoIter<Vec<u8>>,
}

impl DirCopy<'_> {
    /// Copies everything; modes, owners, times, hard links and image attributes are kept.
    ///
    /// # Errors
    /// The source cannot be read, holds what an image cannot, or exceeds the bounds.
    pub(crate) fn run(&self, stage: &mut Stage, budget: &mut Budget) -> Result<(), ImportError> {
        let name = self.source.display().to_string();
        let io = |e: rustix::io::Errno| ImportError::source(self.source, e);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(self.source, flags, Mode::empty()).map_err(io)?;
        let stat = rustix::fs::fstat(&root).map_err(io)?;
        let meta = self.meta(&root, &stat).map_err(|e| self.error(e, b"."))?;
        stage.put_dir(self.at, &meta).map_err(|e| self.error(e, b"."))?;
        let mut links: HashMap<(u64, u64), Vec<u8>> = HashMap::new();
        let mut stack = vec![self.level(root, Vec::new())?];
        while let Some(level) = stack.last_mut() {
            let Some(child) = level.names.next() else {
                stack.pop();
                continue;
            };
            if self.cancel.is_cancelled() {
                return Err(ImportError::Cancelled);
            }
            budget.entry(stage.implied(), &name)?;
            let mut path = level.path.clone();
            path.push(child);
            let written = path.join(&b'/');
            let inner = self.copy_one(stage, budget, &level.dir, &path, &mut links, &name);
            if let Some(dir) = inner.map_err(|e| e.into_import(|e| self.error(e, &written)))? {
                stack.push(self.level(dir, path)?);
            }
        }
        Ok(())
    }

    fn error(&self, e: StageError, entry: &[u8]) -> ImportError {
        match e {
            StageError::Fault(fault) => {
                let source_name = self.source.display().to_string();
                ImportError::Entry { source_name, entry: paths::display(entry), fault }
            }
            StageError::Io(e) => ImportError::io("copy from", self.source, e),
        }
    }

    fn level(&self, dir: OwnedFd, path: Vec<Vec<u8>>) -> Result<Level, ImportError> {
        let read = || -> rustix::io::Result<Vec<Vec<u8>>> {
            let mut names = Vec::new();
            for entry in rustix::fs::Dir::read_from(&dir)? {
                let name = entry?.file_name().to_bytes().to_vec();
                if name != b"." && name != b".." {
                    names.push(name);
                }
            }
            names.sort();
            Ok(names)
        };
        let names = read().map_err(|e| ImportError::io("list", self.source, e))?.into_iter();
        Ok(Level { dir, path, names })
    }

    fn meta(&self, fd: &OwnedFd, stat: &Stat) -> Result<Meta, StageError> {
        let (uid, gid) = self.owner.unwrap_or((stat.st_uid, stat.st_gid));
        Ok(Meta::checked(stat.st_mode, (uid.into(), gid.into()), mtime_of(stat), read_xattrs(fd)?)?)
    }

    /// Copies one entry; a directory is made and handed back to be gone into.
    fn copy_one(
        &self,
        stage: &mut Stage,
        budget: &mut Budget,
        dir: &OwnedFd,
        path: &[Vec<u8>],
        links: &mut HashMap<(u64, u64), Vec<u8>>,
        source_name: &str,
    ) -> Result<Option<OwnedFd>, CopyError> {
        let written = path.join(&b'/');
        let own = paths::components(&written)?;
        let parts = [self.at, &own].concat();
        let Some(name) = path.last() else { return Ok(None) };
        let fd =
            rustix::fs::openat(dir, name.as_slice(), OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let stat = rustix::fs::statat(&fd, c"", AtFlags::EMPTY_PATH)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let full = parts.join(&b'/');
        if kind != FileType::Directory && stat.st_nlink > 1 && kind != FileType::Socket {
            if let Some(first) = links.get(&(stat.st_dev, stat.st_ino)) {
                stage.put_hardlink(&parts, first)?;
                return Ok(None);
            }
            links.insert((stat.st_dev, stat.st_ino), full);
        }
        match kind {
            FileType::CharacterDevice | FileType::BlockDevice => {
                if own.first() != Some(&&b"dev"[..]) {
                    return Err(EntryFault::Device.into());
                }
                budget.devices_dropped += 1;
            }
            FileType::Socket => budget.sockets_dropped += 1,
            FileType::Directory => {
                stage.put_dir(&parts, &self.meta(&fd, &stat)?)?;
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                return Ok(Some(rustix::fs::openat(dir, name.as_slice(), flags, Mode::empty())?));
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(&fd, c"", Vec::new())?;
                stage.put_symlink(&parts, target.as_bytes(), &self.meta(&fd, &stat)?)?;
            }
            FileType::Fifo => stage.put_fifo(&parts, &self.meta(&fd, &stat)?)?,
            _ => {
                budget.take(u64::try_from(stat.st_size).unwrap_or(0), source_name).map_err(CopyError::Import)?;
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let source = rustix::fs::openat(dir, name.as_slice(), flags, Mode::empty())?;
                let target = File::from(stage.create_file(&parts)?);
                let source = File::from(source);
                // No more than the size counted above, should the file be growing.
                let mut bounded = std::io::Read::take(&source, u64::try_from(stat.st_size).unwrap_or(0));
                write_holes(&target, &mut bounded)?;
                stage.finish_file(&target, &self.meta(&fd, &stat)?)?;
            }
        }
        Ok(None)
    }
}

enum CopyError {
    Stage(StageError),
    Import(ImportError),
}

impl CopyError {
    fn into_import(self, f: impl FnOnce(StageError) -> ImportError) -> ImportError {
        match self {
            Self::Stage(e) => f(e),
            Self::Import(e) => e,
        }
    }
}

impl<E: Into<StageError>> From<E> for CopyError {
    fn from(e: E) -> Self {
        Self::Stage(e.into())
    }
}
