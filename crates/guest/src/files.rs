//! Operations on single files and directories.

use crate::made_up;
use crate::paths::{self, failed, io_failed, open_parent, open_parent_following, refused};
use crate::protocol::{Kind, MAX_ENTRIES, MAX_PAYLOAD, OpError, OpErrorKind, read_frame, write_frame};
use crate::trees;
use crate::walk::{Step, Walk};
use corral_api::files::{FileStatus, FileType};
use corral_api::text::readable;
use rustix::fs::{self, AtFlags, Mode, OFlags, RenameFlags, Stat, mkdirat, openat, renameat_with, statat, unlinkat};
use rustix::io::Errno;
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;

/// What a stat says, in the API's terms.
pub fn status(path: impl AsRef<OsStr>, stat: &Stat, link_target: Option<CString>) -> FileStatus {
    let (path, path_base64) = readable(path.as_ref().as_bytes());
    let (link_target, link_target_base64) = link_target.map(|target| readable(target.as_bytes())).unzip();
    let file_type = match fs::FileType::from_raw_mode(stat.st_mode) {
        fs::FileType::RegularFile => FileType::File,
        fs::FileType::Directory => FileType::Directory,
        fs::FileType::Symlink => FileType::Symlink,
        fs::FileType::Fifo => FileType::Fifo,
        fs::FileType::Socket => FileType::Socket,
        _ => FileType::Device,
    };
    FileStatus {
        path,
        file_type,
        size_bytes: stat.st_size as u64,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime_ms: stat.st_mtime.saturating_mul(1000).saturating_add((stat.st_mtime_nsec / 1_000_000) as i64),
        link_target,
        path_base64,
        link_target_base64: link_target_base64.flatten(),
    }
}

fn link_target(dir: &OwnedFd, name: impl rustix::path::Arg, stat: &Stat) -> Option<CString> {
    if fs::FileType::from_raw_mode(stat.st_mode) != fs::FileType::Symlink {
        return None;
    }
    fs::readlinkat(dir, name, Vec::new()).ok()
}

/// Attributes of a path; of a link itself.
pub fn stat(path: &str) -> Result<FileStatus, OpError> {
    if path.trim_end_matches('/').is_empty() {
        let root = paths::open("/", OFlags::PATH).map_err(|e| failed(path, e))?;
        return fs::fstat(&root).map(|s| status("/", &s, None)).map_err(|e| failed(path, e));
    }
    let (dir, name) = open_parent(path)?;
    let stat = statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW).map_err(|e| failed(path, e))?;
    let target = link_target(&dir, name.as_str(), &stat);
    Ok(status(path, &stat, target))
}

/// Opens a file for a read and goes to the byte that `first` names, given the file's size; at most to its end.
pub fn open_for_read(path: &str, first: impl Fn(u64) -> u64) -> Result<(Box<dyn Read>, FileStatus), OpError> {
    let (mut file, mut stat) = paths::open_regular(path)?;
    let made_up = made_up::holds(&file).then(|| made_up::read(path, &mut file)).transpose()?;
    if let Some(bytes) = &made_up {
        stat.st_size = bytes.len() as i64;
    }
    let size = stat.st_size as u64;
    let first = first(size).min(size);
    let content: Box<dyn Read> = match made_up {
        Some(mut bytes) => {
            bytes.drain(..first as usize);
            Box::new(Cursor::new(bytes))
        }
        None => {
            file.seek(SeekFrom::Start(first)).map_err(|_| failed(path, Errno::IO))?;
            Box::new(file)
        }
    };
    Ok((content, status(path, &stat, None)))
}

/// Sends bytes of a file, up to a limit.
pub fn send(content: impl Read, limit: Option<u64>, socket: &mut UnixStream) -> std::io::Result<()> {
    let mut content = content.take(limit.unwrap_or(u64::MAX));
    let mut buffer = vec![0; MAX_PAYLOAD];
    loop {
        let n = content.read(&mut buffer)?;
        if n == 0 {
            return write_frame(socket, Kind::End, &[]);
        }
        write_frame(socket, Kind::Data, &buffer[..n])?;
    }
}

/// Writes the bytes that follow on the socket into a temporary file and renames it to its name.
pub fn write(path: &str, mode: Option<u32>, parents: bool, socket: &mut UnixStream) -> Result<FileStatus, OpError> {
    if parents {
        paths::make_directories(paths::split(path)?.0, 0o755)?;
    }
    let (dir, name) = open_parent_following(path)?;
    let before = match statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => match fs::FileType::from_raw_mode(stat.st_mode) {
            fs::FileType::RegularFile => Some(stat),
            fs::FileType::Directory => return Err(failed(path, Errno::ISDIR)),
            _ => return Err(refused(OpErrorKind::WrongType, path, "it is not a regular file")),
        },
        Err(Errno::NOENT) => None,
        Err(other) => return Err(failed(path, other)),
    };
    let temporary = format!(".corral-{}.tmp", std::process::id());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = openat(&dir, &temporary, flags, Mode::from_raw_mode(0o600)).map_err(|e| io_failed(path, &e.into()))?;
    let finished = receive(path, &file, socket).and_then(|()| {
        let mode = mode.unwrap_or_else(|| before.as_ref().map_or(0o644, |s| s.st_mode & 0o7777));
        if let Some(stat) = &before {
            // Only root may give a file away; for others the file becomes theirs.
            let owner = (fs::Uid::from_raw(stat.st_uid), fs::Gid::from_raw(stat.st_gid));
            fs::fchown(&file, Some(owner.0), Some(owner.1)).unwrap_or(());
        }
        fs::fchmod(&file, Mode::from_raw_mode(mode & 0o7777)).map_err(|e| failed(path, e))?;
        fs::renameat(&dir, &temporary, &dir, &name).map_err(|e| io_failed(path, &e.into()))?;
        fs::fstat(&file).map_err(|e| failed(path, e))
    });
    match finished {
        Ok(stat) => Ok(status(path, &stat, None)),
        Err(error) => {
            unlinkat(&dir, &temporary, AtFlags::empty()).unwrap_or(());
            Err(error)
        }
    }
}

fn receive(path: &str, file: &OwnedFd, socket: &mut UnixStream) -> Result<(), OpError> {
    let mut file = File::from(file.as_fd().try_clone_to_owned().map_err(|_| failed(path, Errno::MFILE))?);
    let mut payload = Vec::new();
    loop {
        match read_frame(socket, &mut payload) {
            Ok(Some(Kind::Data)) => file.write_all(&payload).map_err(|e| io_failed(path, &e))?,
            Ok(Some(Kind::End)) => return Ok(()),
            _ => return Err(refused(OpErrorKind::Failed, path, "the upload broke off; nothing was changed")),
        }
    }
}

/// Entries of a directory, sorted; and whether there were more.
pub fn list(path: &str, depth: u32, limit: u32) -> Result<(Vec<FileStatus>, bool), OpError> {
    let limit = limit.clamp(1, MAX_ENTRIES) as usize;
    let mut walk = Walk::new(paths::open_directory(path)?, path)?;
    let mut entries = Vec::new();
    while let Some(step) = walk.next(depth.max(1) as usize)? {
        let Step::Entry { dir, name, relative, stat } = step else { continue };
        if entries.len() == limit {
            return Ok((entries, true));
        }
        let target = link_target(dir, name, &stat);
        entries.push(status(&relative, &stat, target));
    }
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    Ok((entries, false))
}

/// Makes a directory.
pub fn mkdir(path: &str, parents: bool, mode: u32) -> Result<FileStatus, OpError> {
    if parents {
        paths::make_directories(path, mode & 0o7777)?;
    } else {
        let (dir, name) = open_parent(path)?;
        mkdirat(&dir, &name, Mode::from_raw_mode(mode & 0o7777)).map_err(|e| failed(path, e))?;
        let made =
            openat(&dir, &name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
        // The umask is not asked for.
        made.and_then(|d| fs::fchmod(&d, Mode::from_raw_mode(mode & 0o7777))).map_err(|e| failed(path, e))?;
    }
    stat(path)
}

/// Renames.
pub fn rename(from: &str, to: &str, overwrite: bool) -> Result<FileStatus, OpError> {
    let (from_dir, from_name) = open_parent(from)?;
    let (to_dir, to_name) = open_parent(to)?;
    let flags = if overwrite { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    match renameat_with(&from_dir, &from_name, &to_dir, &to_name, flags) {
        Ok(()) => stat(to),
        Err(Errno::EXIST | Errno::NOTEMPTY) => Err(failed(to, Errno::EXIST)),
        // An overlay does not rename directories of lower layers, nor does any filesystem across another: copy as mv does.
        Err(Errno::XDEV) => {
            trees::copy(&from_dir, &from_name, &to_dir, &to_name, from, to, overwrite)?;
            trees::remove(from, true)?;
            stat(to)
        }
        Err(other) => Err(failed(from, other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_host_is_told_apart_from_a_full_quota() {
        let told = |errno: Errno| io_failed("/f", &errno.into());
        assert_eq!(told(Errno::DQUOT).kind, OpErrorKind::DiskFull);
        let full = told(Errno::NOSPC);
        assert_eq!(full.kind, OpErrorKind::NoRoom);
        assert!(full.message.starts_with("/f: the host's space"), "{full:?}");
        assert_eq!(told(Errno::ACCESS).kind, OpErrorKind::Denied);
    }
}
