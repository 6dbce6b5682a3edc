//! Files of a directory store: how they are reached, read and removed.

use crate::error::StoreError;
use crate::exact;
use crate::key::Key;
use crate::store::ObjectMeta;
use bytes::Bytes;
use rustix::buffer::spare_capacity;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime};

/// The directory of a store, held open, so that a mount that goes away is an error and not an empty directory. What is
/// not in it is looked for once more in the directory that has its name now: the one that is held may be the place of a
/// mount that was missing and is there again.
#[derive(Debug)]
pub(super) struct Root {
    path: PathBuf,
    dir: RwLock<Arc<OwnedFd>>,
}

impl Root {
    pub(super) fn open(path: &Path) -> Result<Self, StoreError> {
        let dir = Self::open_dir(path).map_err(|errno| match errno {
            Errno::NOENT => StoreError::config(format!("the directory {} is not there", path.display())),
            Errno::NOTDIR => StoreError::config(format!("{} is not a directory", path.display())),
            errno => StoreError::io("open", path.display().to_string(), errno),
        })?;
        Ok(Self { path: path.to_owned(), dir: RwLock::new(Arc::new(dir)) })
    }

    /// Opens what lies at a key, here or in the directory that came in the place of this one.
    fn open_key(&self, key: &Key, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let held = self.dir();
        let found = open_beneath(held.as_fd(), key.as_str(), flags);
        if !matches!(found, Err(Errno::NOENT)) {
            return found;
        }
        let Some(dir) = self.successor(&held) else { return found };
        let there = open_beneath(dir.as_fd(), key.as_str(), flags)?;
        *self.dir.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(dir);
        Ok(there)
    }

    /// The directory at the root's path, where that is another one now.
    fn successor(&self, held: &OwnedFd) -> Option<OwnedFd> {
        let identity = |dir: &OwnedFd| rustix::fs::fstat(dir).map(|stat| (stat.st_dev, stat.st_ino)).ok();
        let dir = Self::open_dir(&self.path).ok()?;
        (identity(&dir)? != identity(held)?).then_some(dir)
    }

    fn open_dir(path: &Path) -> rustix::io::Result<OwnedFd> {
        rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    }

    pub(super) fn dir(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.dir.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Passes a result through. Where the server forgot the directory (NFS after a restart), it is opened anew, so that
    /// the next try finds it.
    pub(super) fn heal<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        if let Err(StoreError::Io { source, .. }) = &result
            && Errno::from_io_error(source) == Some(Errno::STALE)
            && let Ok(dir) = Self::open_dir(&self.path)
        {
            *self.dir.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(dir);
        }
        result
    }

    /// Opens an object for reading, and tells its size.
    fn open_object(&self, op: &'static str, key: &Key) -> Result<(OwnedFd, u64), StoreError> {
        let io = |errno| StoreError::io(op, key.as_str(), errno);
        // Without O_NONBLOCK a FIFO that someone left here would hold the thread.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = self.open_key(key, flags).map_err(io)?;
        let stat = rustix::fs::fstat(&file).map_err(io)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(StoreError::NotFound { key: key.to_string() });
        }
        Ok((file, stat.st_size as u64))
    }

    pub(super) fn read_at(&self, key: &Key, start: u64, length: u64) -> Result<Bytes, StoreError> {
        let (file, size) = self.open_object("get_range", key)?;
        // Known before memory is taken for it.
        exact::within(key, start.saturating_add(length), size)?;
        read_exactly(&file, key, start, length)
    }

    pub(super) fn read_all(&self, key: &Key, max_len: u64) -> Result<Bytes, StoreError> {
        let (file, size) = self.open_object("get", key)?;
        read_exactly(&file, key, 0, exact::at_most(key, size, max_len)?)
    }

    pub(super) fn meta(&self, key: &Key) -> Result<Option<ObjectMeta>, StoreError> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        let stat = match self.open_key(key, flags).and_then(rustix::fs::fstat) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            stat => stat.map_err(|errno| StoreError::io("head", key.as_str(), errno))?,
        };
        Ok(meta_of(&stat))
    }

    pub(super) fn remove(&self, key: &Key) -> Result<(), StoreError> {
        let (parent, name) = split(key);
        let dir = self.dir();
        let io = |errno| StoreError::io("delete", key.as_str(), errno);
        let parent = match open_beneath(dir.as_fd(), parent, OFlags::PATH | OFlags::DIRECTORY) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            parent => parent.map_err(io)?,
        };
        match rustix::fs::unlinkat(&parent, name, AtFlags::empty()) {
            Err(Errno::NOENT | Errno::ISDIR) => Ok(()),
            done => done.map_err(io),
        }
    }
}

/// Opens what lies beneath a directory, through no link of any kind.
pub(super) fn open_beneath(dir: BorrowedFd<'_>, path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(dir, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
}

/// The directory and the name of an object; the directory is `.` for keys of one segment.
pub(super) fn split(key: &Key) -> (&str, &str) {
    key.as_str().rsplit_once('/').unwrap_or((".", key.as_str()))
}

/// What an object's status says, or nothing where it is no file.
pub(super) fn meta_of(stat: &Stat) -> Option<ObjectMeta> {
    (FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
        .then(|| ObjectMeta { size: stat.st_size as u64, modified: modified(stat) })
}

/// When a file was last written. Times before 1970 are taken for 1970.
pub(super) fn modified(stat: &Stat) -> SystemTime {
    let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
    SystemTime::UNIX_EPOCH + Duration::new(seconds, u32::try_from(stat.st_mtime_nsec).unwrap_or(0))
}

fn read_exactly(file: &OwnedFd, key: &Key, start: u64, length: u64) -> Result<Bytes, StoreError> {
    let whole = usize::try_from(length).map_err(|_| exact::wrong(key, length, 0))?;
    let mut bytes = Vec::with_capacity(whole);
    while bytes.len() < whole {
        let at = start + bytes.len() as u64;
        match rustix::io::pread(file, spare_capacity(&mut bytes), at) {
            // The file was cut under us.
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(StoreError::io("read", key.as_str(), errno)),
        }
    }
    // An allocator may give more room than asked for.
    bytes.truncate(whole);
    exact::exactly(key, length, Bytes::from(bytes))
}
