//! Paths, resolved beneath the sandbox's root whatever links point at and whoever renames meanwhile.

use crate::patience::patiently;
use crate::protocol::{OpError, OpErrorKind};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat, mkdirat, openat, openat2, readlinkat, statat,
};
use rustix::io::Errno;
use std::os::fd::OwnedFd;

/// Links followed before giving up, as in the kernel.
const MAX_LINKS: usize = 40;

/// An I/O error of this path.
pub fn io_failed(path: &str, error: &std::io::Error) -> OpError {
    error.raw_os_error().map_or_else(
        || refused(OpErrorKind::Failed, path, &error.to_string()),
        |raw| failed(path, Errno::from_raw_os_error(raw)),
    )
}

/// An error of this path.
pub fn failed(path: &str, errno: Errno) -> OpError {
    use OpErrorKind as K;
    let (kind, what) = match errno {
        Errno::NOENT => (K::NotFound, "no such file or directory"),
        Errno::NOTDIR => (K::WrongType, "a part of the path is not a directory"),
        Errno::ISDIR => (K::WrongType, "it is a directory"),
        Errno::EXIST => (K::Exists, "it exists already"),
        Errno::NOTEMPTY => (K::Exists, "the directory is not empty"),
        Errno::ACCESS | Errno::PERM => (K::Denied, "permission denied"),
        Errno::ROFS => (K::Denied, "read-only file system"),
        Errno::DQUOT => (K::DiskFull, "the disk quota is used up"),
        Errno::NOSPC => (K::NoRoom, "the host's space for it is full; the sandbox's disk quota is not used up"),
        Errno::NAMETOOLONG => (K::BadPath, "the path is too long"),
        Errno::LOOP => (K::BadPath, "too many symbolic links"),
        Errno::INVAL => (K::BadPath, "the path cannot be used for this"),
        Errno::XDEV => (K::BadPath, "it cannot be moved across file systems"),
        Errno::AGAIN => (K::Busy, "a lease is held on it, or it is renamed all the time: try again"),
        Errno::NOMEM | Errno::MFILE | Errno::NFILE => (K::Limit, "a limit is reached"),
        Errno::NXIO | Errno::NODEV => (K::WrongType, "it is not a regular file"),
        Errno::OPNOTSUPP => (K::WrongType, "it is of a type that this cannot be done with"),
        Errno::BUSY | Errno::TXTBSY => (K::Denied, "it is in use: a mount point, or a program that runs"),
        _ => return OpError { kind: K::Failed, message: format!("{path}: {errno}") },
    };
    OpError { kind, message: format!("{path}: {what}") }
}

/// An error of a sort with a text.
pub fn refused(kind: OpErrorKind, path: &str, what: &str) -> OpError {
    OpError { kind, message: format!("{path}: {what}") }
}

fn root() -> Result<OwnedFd, Errno> {
    openat(CWD, "/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// Opens a path beneath the root, following links inside it.
pub fn open(path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    patiently(|| openat2(root()?, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve))
}

/// Opens a regular file for reading; anything else is refused before it is opened, so that nothing blocks.
pub fn open_regular(path: &str) -> Result<(std::fs::File, Stat), OpError> {
    let handle = open(path, OFlags::PATH).map_err(|e| failed(path, e))?;
    let stat = rustix::fs::fstat(&handle).map_err(|e| failed(path, e))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {}
        FileType::Directory => return Err(failed(path, Errno::ISDIR)),
        _ => return Err(refused(OpErrorKind::WrongType, path, "it is not a regular file")),
    }
    // The second look-up may meet another file: NONBLOCK keeps a pipe from blocking, the comparison finds it out.
    let file = open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY).map_err(|e| failed(path, e))?;
    let opened = rustix::fs::fstat(&file).map_err(|e| failed(path, e))?;
    if FileType::from_raw_mode(opened.st_mode) != FileType::RegularFile {
        return Err(refused(OpErrorKind::WrongType, path, "it is not a regular file"));
    }
    Ok((file.into(), opened))
}

/// Opens a directory for reading.
pub fn open_directory(path: &str) -> Result<OwnedFd, OpError> {
    open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK).map_err(|e| failed(path, e))
}

/// Splits off the last component. `/` and names such as `..` have none.
pub fn split(path: &str) -> Result<(&str, &str), OpError> {
    let trimmed = path.trim_end_matches('/');
    let (parent, name) = trimmed.rsplit_once('/').unwrap_or(("", trimmed));
    if name.is_empty() || name == "." || name == ".." {
        return Err(refused(OpErrorKind::BadPath, path, "it must end in a name"));
    }
    Ok((if parent.is_empty() { "/" } else { parent }, name))
}

/// The directory a path's last component lies in, open, and that component's name. The component is not followed.
pub fn open_parent(path: &str) -> Result<(OwnedFd, String), OpError> {
    let (parent, name) = split(path)?;
    let dir = open(parent, OFlags::PATH | OFlags::DIRECTORY).map_err(|e| failed(path, e))?;
    Ok((dir, name.to_owned()))
}

/// As [`open_parent`], but where the last component is a symbolic link, that of what it points at.
pub fn open_parent_following(path: &str) -> Result<(OwnedFd, String), OpError> {
    let mut current = path.to_owned();
    for _ in 0..MAX_LINKS {
        let (dir, name) = open_parent(&current)?;
        match statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink => {
                let target = readlinkat(&dir, &name, Vec::new()).map_err(|e| failed(path, e))?;
                let target = target.to_str().map_err(|_| failed(path, Errno::INVAL))?;
                let (parent, _) = split(&current)?;
                current = if target.starts_with('/') { target.to_owned() } else { format!("{parent}/{target}") };
            }
            _ => return Ok((dir, name)),
        }
    }
    Err(failed(path, Errno::LOOP))
}

/// Makes the missing directories of a path.
pub fn make_directories(path: &str, mode: u32) -> Result<(), OpError> {
    let mut done = String::new();
    for part in path.split('/').filter(|p| !p.is_empty()) {
        let parent = if done.is_empty() { "/".to_owned() } else { done.clone() };
        done = format!("{done}/{part}");
        match open(&done, OFlags::PATH | OFlags::DIRECTORY) {
            Ok(_) => continue,
            Err(Errno::NOENT) => {}
            Err(other) => return Err(failed(&done, other)),
        }
        let dir = open(&parent, OFlags::PATH | OFlags::DIRECTORY).map_err(|e| failed(&parent, e))?;
        match mkdirat(&dir, part, Mode::from_raw_mode(mode)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(other) => return Err(failed(&done, other)),
        }
    }
    Ok(())
}
