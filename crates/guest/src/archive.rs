//! Trees as tar streams, in and out.

use crate::paths::{self, failed, io_failed, refused};
use crate::patience::patiently;
use crate::protocol::{Kind, MAX_PAYLOAD, OpError, OpErrorKind, read_frame, write_frame};
use crate::walk::{Step, Walk};
use rustix::fs::{
    self, AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat, mkdirat, openat, openat2, statat, unlinkat,
};
use rustix::io::Errno;
use std::ffi::{CStr, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// The largest id of a sandbox.
const MAX_ID: u32 = 65_535;

/// A writer that makes data frames.
struct FrameWriter<'a> {
    socket: &'a mut UnixStream,
    buffer: Vec<u8>,
}

impl Write for FrameWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(MAX_PAYLOAD - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..n]);
        if self.buffer.len() == MAX_PAYLOAD {
            self.flush()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.buffer.is_empty() {
            write_frame(self.socket, Kind::Data, &self.buffer)?;
            self.buffer.clear();
        }
        Ok(())
    }
}

/// A reader over data frames.
struct FrameReader<'a> {
    socket: &'a mut UnixStream,
    payload: Vec<u8>,
    at: usize,
    ended: bool,
}

impl Read for FrameReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.at == self.payload.len() && !self.ended {
            self.at = 0;
            match read_frame(self.socket, &mut self.payload)? {
                Some(Kind::Data) => {}
                Some(Kind::End) => {
                    self.ended = true;
                    self.payload.clear();
                }
                _ => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
        let n = out.len().min(self.payload.len() - self.at);
        out[..n].copy_from_slice(&self.payload[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}

/// Sends a directory's content, or a single file, as a tar stream. What is mounted below is left out.
pub fn send(path: &str, socket: &mut UnixStream) -> Result<(), OpError> {
    let handle = paths::open(path, OFlags::PATH).map_err(|e| failed(path, e))?;
    let stat = fs::fstat(&handle).map_err(|e| failed(path, e))?;
    let writer = FrameWriter { socket, buffer: Vec::with_capacity(MAX_PAYLOAD) };
    let mut tar = tar::Builder::new(writer);
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        let device = stat.st_dev;
        let mut walk = Walk::new(paths::open_directory(path)?, path)?;
        while let Some(step) = walk.next(usize::MAX)? {
            if let Step::Entry { dir, name, relative, stat } = step {
                if FileType::from_raw_mode(stat.st_mode) == FileType::Directory && stat.st_dev != device {
                    walk.stay_out();
                    continue;
                }
                append(&mut tar, dir, name, &relative, &stat).map_err(|e| io_failed(path, &e))?;
            }
        }
    } else {
        let (file, stat) = paths::open_regular(path)?;
        let (_, name) = paths::split(path)?;
        let mut header = header_of(&stat);
        header.set_entry_type(tar::EntryType::Regular);
        append_bytes(&mut tar, &mut header, OsStr::new(name), file, stat.st_size as u64)
            .map_err(|e| io_failed(path, &e))?;
    }
    let mut writer = tar.into_inner().map_err(|e| io_failed(path, &e))?;
    writer.flush().and_then(|()| write_frame(writer.socket, Kind::End, &[])).map_err(|e| io_failed(path, &e))
}

fn header_of(stat: &Stat) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_mode(stat.st_mode & 0o7777);
    header.set_uid(stat.st_uid.into());
    header.set_gid(stat.st_gid.into());
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(0);
    header
}

fn append(
    tar: &mut tar::Builder<FrameWriter<'_>>,
    dir: &OwnedFd,
    name: &CStr,
    relative: &OsStr,
    stat: &Stat,
) -> io::Result<()> {
    let relative = &sendable(relative);
    let mut header = header_of(stat);
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => {
            header.set_entry_type(tar::EntryType::Directory);
            let mut name = relative.to_owned();
            name.push("/");
            tar.append_data(&mut header, name, io::empty())
        }
        FileType::Symlink => {
            let target = fs::readlinkat(dir, name, Vec::new())?;
            header.set_entry_type(tar::EntryType::Symlink);
            tar.append_link(&mut header, relative, Path::new(OsStr::from_bytes(target.to_bytes())))
        }
        FileType::RegularFile => {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = match patiently(|| openat(dir, name, flags, Mode::empty())) {
                Ok(file) => File::from(file),
                // Removed or replaced since it was listed.
                Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(()),
                Err(other) => return Err(other.into()),
            };
            let now = fs::fstat(&file)?;
            if FileType::from_raw_mode(now.st_mode) != FileType::RegularFile {
                return Ok(());
            }
            header.set_entry_type(tar::EntryType::Regular);
            append_bytes(tar, &mut header, relative, file, now.st_size as u64)
        }
        FileType::Fifo => {
            header.set_entry_type(tar::EntryType::Fifo);
            tar.append_data(&mut header, relative, io::empty())
        }
        // Sockets and devices mean nothing elsewhere.
        _ => Ok(()),
    }
}

/// A name that has no room in a header leaves there the text that it begins with, which the crate `tar` refuses to be
/// nothing: below `./` it is something.
fn sendable(name: &OsStr) -> OsString {
    match name.as_bytes() {
        [first, ..] if !first.is_ascii() => [OsStr::new("./"), name].into_iter().collect(),
        _ => name.to_owned(),
    }
}

/// Appends exactly `size` bytes: a file that shrinks meanwhile is filled up with zeroes, one that grows is cut.
fn append_bytes(
    tar: &mut tar::Builder<FrameWriter<'_>>,
    header: &mut tar::Header,
    name: &OsStr,
    file: File,
    size: u64,
) -> io::Result<()> {
    header.set_size(size);
    tar.append_data(header, name, file.take(size).chain(io::repeat(0)).take(size))
}

/// Unpacks the tar stream that follows on the socket into a directory.
pub fn receive(path: &str, owners: bool, socket: &mut UnixStream) -> Result<(), OpError> {
    paths::make_directories(path, 0o755)?;
    let top = paths::open_directory(path)?;
    let reader = FrameReader { socket, payload: Vec::new(), at: 0, ended: false };
    let mut archive = tar::Archive::new(reader);
    let bad = |e: &io::Error| match e.raw_os_error() {
        Some(_) => io_failed(path, e),
        None => refused(OpErrorKind::BadArchive, path, &format!("the archive cannot be read: {e}")),
    };
    for entry in archive.entries().map_err(|e| bad(&e))? {
        let mut entry = entry.map_err(|e| bad(&e))?;
        let name = entry.path().map_err(|e| bad(&e))?.into_owned();
        unpack(&top, &mut entry, &name, owners).map_err(|error| match error {
            Unpack::Io(e) => bad(&e),
            Unpack::Refused(what) => refused(OpErrorKind::BadArchive, &name.to_string_lossy(), what),
        })?;
    }
    // What follows the end mark still has to be taken, or the sender blocks.
    io::copy(&mut archive.into_inner(), &mut io::sink()).map_err(|e| bad(&e))?;
    Ok(())
}

enum Unpack {
    Io(io::Error),
    Refused(&'static str),
}

impl<E: Into<io::Error>> From<E> for Unpack {
    fn from(error: E) -> Self {
        Self::Io(error.into())
    }
}

/// Unpacks one entry. Its parents are looked up beneath the directory, links included, and never above it.
fn unpack<R: Read>(top: &OwnedFd, entry: &mut tar::Entry<'_, R>, name: &Path, owners: bool) -> Result<(), Unpack> {
    use std::path::Component;
    let mut parts = Vec::new();
    for component in name.components() {
        match component {
            Component::Normal(part) => parts.push(part),
            Component::CurDir | Component::RootDir => {}
            _ => return Err(Unpack::Refused("its name leads out of the directory")),
        }
    }
    let Some((last, parents)) = parts.split_last() else {
        return Ok(());
    };
    let mut dir = beneath(top, Path::new("."))?;
    for parent in parents {
        dir = match beneath(&dir, Path::new(parent)) {
            Ok(found) => found,
            Err(Errno::NOENT) => {
                mkdirat(&dir, *parent, Mode::from_raw_mode(0o755))?;
                beneath(&dir, Path::new(parent))?
            }
            Err(Errno::XDEV) => return Err(Unpack::Refused("a link leads out of the directory")),
            Err(other) => return Err(other.into()),
        };
    }
    let mode = Mode::from_raw_mode(entry.header().mode()? & 0o7777);
    let clear = |dir: &OwnedFd| match statat(dir, *last, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(s) if FileType::from_raw_mode(s.st_mode) == FileType::Directory => Err(Errno::ISDIR),
        Ok(_) => unlinkat(dir, *last, AtFlags::empty()),
        Err(Errno::NOENT) => Ok(()),
        Err(other) => Err(other),
    };
    let owner = if owners { Some(owner_of(entry.header())?) } else { None };
    // By name: what was just made here, unless a process inside replaced it, which may only do harm to itself.
    let give = |dir: &OwnedFd| match owner {
        Some((uid, gid)) => fs::chownat(dir, *last, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW),
        None => Ok(()),
    };
    let mut opened = None;
    match entry.header().entry_type() {
        tar::EntryType::Directory => {
            match mkdirat(&dir, *last, mode) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(other) => return Err(other.into()),
            }
            let made = openat(
                &dir,
                *last,
                OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
                Mode::empty(),
            )?;
            give(&dir)?;
            fs::fchmod(&made, mode)?;
            opened = Some(made);
        }
        tar::EntryType::Symlink => {
            let target = entry.link_name()?.ok_or(Unpack::Refused("a link without a target"))?;
            clear(&dir)?;
            fs::symlinkat(target.as_ref(), &dir, *last)?;
            give(&dir)?;
        }
        tar::EntryType::Link => {
            let target = entry.link_name()?.ok_or(Unpack::Refused("a link without a target"))?;
            let target = target.strip_prefix("/").unwrap_or(&target).to_owned();
            let source = openat2(
                top,
                &target,
                OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
                Mode::empty(),
                ResolveFlags::BENEATH,
            )
            .map_err(|_| Unpack::Refused("a hard link to nothing in the archive"))?;
            clear(&dir)?;
            // By name, since linking a descriptor needs CAP_DAC_READ_SEARCH; the source was just found beneath.
            drop(source);
            fs::linkat(top, &target, &dir, *last, AtFlags::empty())?;
        }
        tar::EntryType::Fifo => {
            clear(&dir)?;
            fs::mknodat(&dir, *last, FileType::Fifo, mode, 0)?;
            give(&dir)?;
        }
        tar::EntryType::Char | tar::EntryType::Block => return Err(Unpack::Refused("devices are not unpacked")),
        kind if kind.is_file() || kind.is_contiguous() || kind.is_gnu_sparse() => {
            clear(&dir)?;
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let file = openat(&dir, *last, flags, Mode::from_raw_mode(0o600))?;
            let mut out = File::from(file);
            io::copy(entry, &mut out)?;
            // Before the mode: a change of owner takes set-user-id off.
            give(&dir)?;
            fs::fchmod(&out, mode)?;
            opened = Some(out.into());
        }
        // Extended headers were applied by the reader.
        _ => return Ok(()),
    }
    if let (Some(file), Ok(seconds)) = (opened, entry.header().mtime()) {
        let time = fs::Timespec { tv_sec: i64::try_from(seconds).unwrap_or(0), tv_nsec: 0 };
        fs::futimens(&file, &fs::Timestamps { last_access: time, last_modification: time })?;
    }
    Ok(())
}

fn owner_of(header: &tar::Header) -> Result<(fs::Uid, fs::Gid), Unpack> {
    let number = |id: io::Result<u64>| id.ok().and_then(|id| u32::try_from(id).ok()).filter(|id| *id <= MAX_ID);
    let refused = Unpack::Refused("its owner has no number that sandboxes have");
    match (number(header.uid()), number(header.gid())) {
        (Some(uid), Some(gid)) => Ok((fs::Uid::from_raw(uid), fs::Gid::from_raw(gid))),
        _ => Err(refused),
    }
}

fn beneath(dir: &OwnedFd, path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat2(dir, path, flags, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_no_text_are_sent_as_they_are() {
        let long = b"\xff".repeat(150);
        for name in [&b"caf\xe9"[..], b"\xff\xfe", long.as_slice(), b"plain"] {
            let mut tar = tar::Builder::new(Vec::new());
            let mut header = tar::Header::new_gnu();
            header.set_size(0);
            tar.append_data(&mut header, sendable(OsStr::from_bytes(name)), io::empty()).unwrap();
            let bytes = tar.into_inner().unwrap();
            let mut archive = tar::Archive::new(bytes.as_slice());
            let entry = archive.entries().unwrap().next().unwrap().unwrap();
            let found = entry.path_bytes().into_owned();
            assert_eq!(found.strip_prefix(b"./").unwrap_or(&found), name);
        }
    }
}
