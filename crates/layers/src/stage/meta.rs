//! Metadata of staged entries: modes, owners, times and the extended attributes that images keep.

use super::{Dir, Stage, StageError};
use crate::error::EntryFault;
use crate::paths;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Extended attributes: (name, value).
pub(crate) type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// Metadata of one entry.
#[derive(Debug, Clone, Default)]
pub(crate) struct Meta {
    /// Permission bits with set-uid, set-gid and sticky.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Seconds and nanoseconds since the epoch.
    pub(crate) mtime: (i64, u32),
    /// Kept attributes, sorted by name.
    pub(crate) xattrs: Xattrs,
}

/// Whether an attribute is part of an image: the user's own, and file capabilities.
pub(crate) fn keeps_xattr(name: &[u8]) -> bool {
    name.starts_with(b"user.") || name == b"security.capability"
}

impl Meta {
    /// Checks owners, keeps the permission bits and the attributes that belong to an image.
    pub(crate) fn checked(
        mode: u32,
        owner: (u64, u64),
        mtime: (i64, u32),
        mut xattrs: Xattrs,
    ) -> Result<Self, EntryFault> {
        let (uid, gid) = owner;
        let (Ok(uid16), Ok(gid16)) = (u16::try_from(uid), u16::try_from(gid)) else {
            return Err(EntryFault::OwnerTooLarge { uid, gid });
        };
        xattrs.retain(|(name, _)| keeps_xattr(name));
        xattrs.sort();
        Ok(Self { mode: mode & 0o7777, uid: uid16.into(), gid: gid16.into(), mtime, xattrs })
    }

    /// Root's, mode 0755, at the epoch: a directory nothing is known about.
    pub(crate) fn default_dir() -> Self {
        Self { mode: 0o755, ..Self::default() }
    }

    /// Metadata of an open file, as it is.
    pub(crate) fn of(fd: &OwnedFd, stat: &Stat) -> Result<Self, StageError> {
        let owner = (u64::from(stat.st_uid), u64::from(stat.st_gid));
        Ok(Self::checked(stat.st_mode, owner, mtime_of(stat), read_xattrs(fd)?)?)
    }
}

/// Modification time of a stat, not before the epoch.
pub(crate) fn mtime_of(stat: &Stat) -> (i64, u32) {
    (stat.st_mtime.max(0), u32::try_from(stat.st_mtime_nsec).unwrap_or(0))
}

fn timestamps(mtime: (i64, u32)) -> Timestamps {
    let time = Timespec { tv_sec: mtime.0, tv_nsec: mtime.1.into() };
    Timestamps { last_access: time, last_modification: time }
}

/// Attributes of an open file (`O_PATH` included) that belong to an image.
pub(crate) fn read_xattrs(fd: &OwnedFd) -> Result<Xattrs, StageError> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let mut list = Vec::with_capacity(65536);
    match rustix::fs::listxattr(path.as_str(), rustix::buffer::spare_capacity(&mut list)) {
        Ok(_) => {}
        Err(Errno::NOTSUP) => return Ok(Vec::new()),
        Err(e) => return Err(e.into()),
    }
    let mut out = Vec::new();
    for name in list.split(|b| *b == 0).filter(|name| keeps_xattr(name)) {
        let mut value = Vec::with_capacity(65536);
        rustix::fs::getxattr(path.as_str(), name, rustix::buffer::spare_capacity(&mut value))?;
        out.push((name.to_vec(), value));
    }
    Ok(out)
}

/// Sets everything of an open regular file; the mode last but for attributes, since a change of owner clears both.
fn set_fd_meta(fd: impl AsFd, meta: &Meta) -> Result<(), StageError> {
    let fd = fd.as_fd();
    let (uid, gid) = (Uid::from_raw(meta.uid), Gid::from_raw(meta.gid));
    rustix::fs::fchown(fd, Some(uid), Some(gid))?;
    rustix::fs::fchmod(fd, Mode::from_raw_mode(meta.mode))?;
    for (name, value) in &meta.xattrs {
        rustix::fs::fsetxattr(fd, name.as_slice(), value, XattrFlags::empty())
            .map_err(|e| EntryFault::Xattr { name: paths::display(name), source: e.into() })?;
    }
    Ok(())
}

/// Owner and time of a symbolic link, which has no mode of its own and no attributes of an image.
pub(super) fn set_link_meta(parent: &OwnedFd, name: &[u8], meta: &Meta) -> Result<(), StageError> {
    let (uid, gid) = (Uid::from_raw(meta.uid), Gid::from_raw(meta.gid));
    rustix::fs::chownat(parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(rustix::fs::utimensat(parent, name, &timestamps(meta.mtime), AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Owner, mode and time of a FIFO, which was just made and is no link.
pub(super) fn set_node_meta(parent: &OwnedFd, name: &[u8], meta: &Meta) -> Result<(), StageError> {
    set_link_meta(parent, name, meta)?;
    Ok(rustix::fs::chmodat(parent, name, Mode::from_raw_mode(meta.mode), AtFlags::empty())?)
}

impl Stage {
    /// Gives a filled file its metadata.
    pub(crate) fn finish_file(&mut self, file: &File, meta: &Meta) -> Result<(), StageError> {
        set_fd_meta(file, meta)?;
        Ok(rustix::fs::futimens(file, &timestamps(meta.mtime))?)
    }

    /// Gives a directory its metadata now and its time at the end.
    pub(super) fn set_dir_meta(&mut self, dir: &Dir, meta: &Meta) -> Result<(), StageError> {
        for (name, _) in read_xattrs(&dir.fd)? {
            rustix::fs::fremovexattr(&*dir.fd, name.as_slice())?;
        }
        set_fd_meta(&*dir.fd, meta)?;
        self.dir_times.insert(dir.path.to_vec(), meta.mtime);
        Ok(())
    }

    /// Metadata for a directory that no entry describes: that of the one beneath, else the default.
    pub(super) fn implied_meta(&self, path: &[u8]) -> Result<Meta, StageError> {
        let Some(lower) = self.lower_at(path) else { return Ok(Meta::default_dir()) };
        match lower.open_path(path, OFlags::PATH)? {
            Some(fd) => {
                let stat = rustix::fs::statat(&fd, c"", AtFlags::EMPTY_PATH)?;
                if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                    return Meta::of(&fd, &stat);
                }
                Ok(Meta::default_dir())
            }
            None => Ok(Meta::default_dir()),
        }
    }

    /// Copies a file of a stored layer into the stage; `None` where the layers beneath have none there.
    pub(super) fn copy_up(&mut self, dir: &[u8], name: &[u8], path: &[u8]) -> Result<Option<()>, StageError> {
        let Some(lower) = self.lower_at(dir) else { return Ok(None) };
        let Some(fd) = lower.open_path(path, OFlags::PATH)? else { return Ok(None) };
        let stat = rustix::fs::statat(&fd, c"", AtFlags::EMPTY_PATH)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let meta = Meta::of(&fd, &stat)?;
        let parts: Vec<Vec<u8>> = path.split(|b| *b == b'/').map(<[u8]>::to_vec).collect();
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        match kind {
            FileType::RegularFile => {
                let Some(source) = lower.open_path(path, OFlags::RDONLY)? else { return Ok(None) };
                let parent = self.resolve_parent(&parts[..parts.len() - 1])?;
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let target = rustix::fs::openat(&*parent.fd, name, flags, Mode::from_raw_mode(0o600))?;
                let target = File::from(target);
                crate::extract::write_holes(&target, &mut File::from(source))?;
                self.finish_file(&target, &meta)?;
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(&fd, c"", Vec::new())?;
                let parent = self.resolve_parent(&parts[..parts.len() - 1])?;
                rustix::fs::symlinkat(target.as_c_str(), &*parent.fd, name)?;
                set_link_meta(&parent.fd, name, &meta)?;
            }
            FileType::Directory => {
                return Err(EntryFault::LinkToDirectory { target: paths::display(path) }.into());
            }
            _ => return Ok(None),
        }
        Ok(Some(()))
    }

    /// Gives all directories their times. Call when everything is put.
    pub(crate) fn finish(&mut self) -> Result<(), StageError> {
        let times = std::mem::take(&mut self.dir_times);
        // Deepest first is not needed: setting a directory's times does not change its parent's.
        for (path, mtime) in &times {
            let fd = self.open_dir(path)?;
            rustix::fs::futimens(&*fd, &timestamps(*mtime))?;
        }
        Ok(())
    }
}

/// Reads a whole stream into memory of a fixed size, as often as needed: helper of the copying code.
pub(crate) fn read_full(reader: &mut impl Read, buf: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buf.len() {
        match reader.read(&mut buf[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled)
}
