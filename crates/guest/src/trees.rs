//! Whole trees: removed, and copied where a rename is not possible.

use crate::paths::{failed, io_failed, open_parent, refused};
use crate::protocol::{OpError, OpErrorKind};
use crate::walk::{Step, Walk};
use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, Stat, mkdirat, openat, statat, unlinkat};
use rustix::io::Errno;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

/// Removes a file, link, empty directory or, when asked to, a tree.
pub fn remove(path: &str, recursive: bool) -> Result<(), OpError> {
    let (dir, name) = open_parent(path)?;
    let stat = statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW).map_err(|e| failed(path, e))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return unlinkat(&dir, &name, AtFlags::empty()).map_err(|e| failed(path, e));
    }
    if recursive {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let top = openat(&dir, &name, flags, Mode::empty()).map_err(|e| failed(path, e))?;
        let mut walk = Walk::new(top, path)?;
        while let Some(step) = walk.next(usize::MAX)? {
            match step {
                Step::Entry { dir, name, stat, .. } => {
                    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                        unlinkat(dir, name, AtFlags::empty()).map_err(|e| failed(path, e))?;
                    }
                }
                Step::Left { dir, name } => unlinkat(dir, name, AtFlags::REMOVEDIR).map_err(|e| failed(path, e))?,
            }
        }
    }
    unlinkat(&dir, &name, AtFlags::REMOVEDIR).map_err(|e| failed(path, e))
}

/// Copies a tree where a rename is not possible. Leaves nothing at the target when it fails.
pub fn copy(
    from_dir: &OwnedFd,
    from_name: &str,
    to_dir: &OwnedFd,
    to_name: &str,
    from: &str,
    to: &str,
    overwrite: bool,
) -> Result<(), OpError> {
    if statat(to_dir, to_name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
        if !overwrite {
            return Err(failed(to, Errno::EXIST));
        }
        remove(to, false)?;
    }
    if format!("{}/", to.trim_end_matches('/')).starts_with(&format!("{}/", from.trim_end_matches('/'))) {
        return Err(refused(OpErrorKind::BadPath, to, "a directory cannot be moved into itself"));
    }
    let copied = copy_entry(from_dir, from_name, to_dir, to_name, from);
    if copied.is_err() {
        remove(to, true).unwrap_or(());
    }
    copied
}

fn copy_entry(from_dir: &OwnedFd, from_name: &str, to_dir: &OwnedFd, to_name: &str, from: &str) -> Result<(), OpError> {
    let at = |e: Errno| failed(from, e);
    let stat = statat(from_dir, from_name, AtFlags::SYMLINK_NOFOLLOW).map_err(at)?;
    let name = std::ffi::CString::new(from_name).map_err(|_| at(Errno::INVAL))?;
    let to_name = std::ffi::CString::new(to_name).map_err(|_| at(Errno::INVAL))?;
    copy_one(from_dir, &name, to_dir, &to_name, &stat).map_err(|e| io_failed(from, &e))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Ok(());
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let source = openat(from_dir, from_name, flags, Mode::empty()).map_err(at)?;
    let mut target = openat(to_dir, &to_name, flags, Mode::empty()).map_err(at)?;
    let mut depth = Vec::new();
    let mut walk = Walk::new(source, from)?;
    let mut entered = None::<std::ffi::CString>;
    while let Some(step) = walk.next(usize::MAX)? {
        match step {
            Step::Entry { dir, name, stat, .. } => {
                if let Some(into) = entered.take() {
                    let next = openat(&target, &into, flags, Mode::empty()).map_err(at)?;
                    depth.push(std::mem::replace(&mut target, next));
                }
                copy_one(dir, name, &target, name, &stat).map_err(|e| io_failed(from, &e))?;
                if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                    entered = Some(name.to_owned());
                }
            }
            Step::Left { .. } => {
                // An empty directory was never entered here.
                if entered.take().is_none()
                    && let Some(parent) = depth.pop()
                {
                    target = parent;
                }
            }
        }
    }
    Ok(())
}

fn copy_one(from_dir: &OwnedFd, from_name: &CStr, to_dir: &OwnedFd, to_name: &CStr, stat: &Stat) -> io::Result<()> {
    let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => mkdirat(to_dir, to_name, mode)?,
        FileType::Symlink => fs::symlinkat(fs::readlinkat(from_dir, from_name, Vec::new())?, to_dir, to_name)?,
        FileType::RegularFile => {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let mut source = File::from(openat(from_dir, from_name, flags, Mode::empty())?);
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let mut target = File::from(openat(to_dir, to_name, flags, Mode::from_raw_mode(0o600))?);
            io::copy(&mut source, &mut target)?;
            fs::fchmod(&target, mode)?;
        }
        FileType::Fifo => fs::mknodat(to_dir, to_name, FileType::Fifo, mode, 0)?,
        // Sockets and devices.
        _ => return Err(rustix::io::Errno::OPNOTSUPP.into()),
    }
    let owner = (fs::Uid::from_raw(stat.st_uid), fs::Gid::from_raw(stat.st_gid));
    // Only root may give a file away; for others the copy is theirs.
    fs::chownat(to_dir, to_name, Some(owner.0), Some(owner.1), AtFlags::SYMLINK_NOFOLLOW).unwrap_or(());
    let time = fs::Timespec { tv_sec: stat.st_mtime, tv_nsec: stat.st_mtime_nsec as _ };
    let times = fs::Timestamps { last_access: time, last_modification: time };
    fs::utimensat(to_dir, to_name, &times, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(())
}
