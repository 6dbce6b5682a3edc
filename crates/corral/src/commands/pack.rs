//! A directory as a tar stream: names byte for byte, links kept, owners as on disk.
//!
//! What cannot be read, and what changes while it is read, ends the stream with an error that names the file: the
//! other side must not take half of it for the whole. What a file gains meanwhile at its end is no change: it is sent as
//! long as it was. Sockets mean nothing elsewhere and are left out, as tar and docker do.

use crate::output::{printable, tell};
use anyhow::Context as _;
use std::cmp::Ordering;
use std::ffi::OsStr;
use std::fs::{self, File, FileType, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// What becomes of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// It is sent.
    pub send: bool,
    /// A directory is looked into.
    pub descend: bool,
}

impl Choice {
    /// Everything.
    pub const ALL: Self = Self { send: true, descend: true };
}

/// Names below this length are written by the archive as they are.
const SHORT: usize = 100;
/// Bytes of the unit in which the host tells what a file takes.
const BLOCK: u64 = 512;

/// Writes what lies below a directory, sorted by name, and tells `left_out` what cannot be sent. `choose` decides on
/// names relative to the directory. Blocks.
///
/// # Errors
/// Something cannot be read or changes meanwhile, or the writer refuses.
pub fn pack<W: Write>(
    dir: &Path,
    writer: W,
    choose: impl Fn(&[u8], FileType) -> Choice,
    mut left_out: impl FnMut(&Path),
) -> anyhow::Result<()> {
    let mut tar = tar::Builder::new(writer);
    let unread = || format!("cannot read {}", dir.display());
    let metadata = fs::metadata(dir).with_context(unread)?;
    if choose(b"", metadata.file_type()).send {
        other(&mut tar, b".".to_vec(), dir, &metadata).with_context(unread)?;
    }
    let mut stack = below(dir, b"")?;
    while let Some(name) = stack.pop() {
        let real = dir.join(OsStr::from_bytes(&name));
        let unread = || format!("cannot read {}", real.display());
        let metadata = fs::symlink_metadata(&real).with_context(unread)?;
        let kind = metadata.file_type();
        let choice = choose(&name, kind);
        if kind.is_dir() && choice.descend {
            stack.extend(below(dir, &name)?);
        }
        if !choice.send {
            continue;
        }
        if kind.is_socket() {
            left_out(&real);
        } else if kind.is_file() {
            file(&mut tar, &name, &real).with_context(unread)?;
        } else {
            other(&mut tar, name, &real, &metadata).with_context(unread)?;
        }
    }
    tar.finish().context("cannot end the archive")
}

/// What lies in a directory, the last one first.
fn below(dir: &Path, name: &[u8]) -> anyhow::Result<Vec<Vec<u8>>> {
    let real = dir.join(OsStr::from_bytes(name));
    let list = || -> io::Result<Vec<Vec<u8>>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&real)? {
            let found = entry?.file_name().into_vec();
            names.push(if name.is_empty() { found } else { [name, &found].join(&b'/') });
        }
        names.sort_unstable_by(|a, b| b.cmp(a));
        Ok(names)
    };
    list().with_context(|| format!("cannot read the directory {}", real.display()))
}

fn file<W: Write>(tar: &mut tar::Builder<W>, name: &[u8], real: &Path) -> io::Result<()> {
    // What took the file's place meanwhile must neither lead elsewhere nor make anybody wait.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = fs::OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(real)?;
    let mut whole = Whole::of(file)?;
    if whole.has_holes() && name.len() < SHORT {
        // The archive's own way leaves the holes out.
        tar.append_file(OsStr::from_bytes(name), &mut whole.file)?;
        return whole.unchanged();
    }
    let mut header = tar::Header::new_gnu();
    header.set_metadata(&whole.before);
    append(tar, &mut header, name, None, whole)
}

fn other<W: Write>(tar: &mut tar::Builder<W>, mut name: Vec<u8>, real: &Path, metadata: &Metadata) -> io::Result<()> {
    let kind = metadata.file_type();
    let mut header = tar::Header::new_gnu();
    header.set_metadata(metadata);
    header.set_size(0);
    let mut target = None;
    if kind.is_symlink() {
        target = Some(fs::read_link(real)?.into_os_string().into_vec());
    } else if kind.is_dir() {
        name.push(b'/');
    } else if kind.is_char_device() || kind.is_block_device() {
        header.set_device_major(rustix::fs::major(metadata.rdev()))?;
        header.set_device_minor(rustix::fs::minor(metadata.rdev()))?;
    }
    append(tar, &mut header, &name, target.as_deref(), io::empty())
}

/// Appends an entry. Not through the archive's own way, which tidies links up and refuses some long names.
fn append<W: Write>(
    tar: &mut tar::Builder<W>,
    header: &mut tar::Header,
    name: &[u8],
    target: Option<&[u8]>,
    data: impl Read,
) -> io::Result<()> {
    if let Some(target) = target {
        long(tar, b'K', target, header.as_old().linkname.len())?;
        put(&mut header.as_old_mut().linkname, target);
    }
    long(tar, b'L', name, header.as_old().name.len())?;
    put(&mut header.as_old_mut().name, name);
    header.set_cksum();
    tar.append(header, data)
}

fn put(field: &mut [u8], text: &[u8]) {
    let length = text.len().min(field.len());
    field.fill(0);
    field[..length].copy_from_slice(&text[..length]);
}

/// What has no room in a header goes before it, as GNU tar does.
fn long<W: Write>(tar: &mut tar::Builder<W>, kind: u8, text: &[u8], room: usize) -> io::Result<()> {
    if text.len() < room {
        return Ok(());
    }
    let mut header = tar::Header::new_gnu();
    put(&mut header.as_old_mut().name, b"././@LongLink");
    header.set_entry_type(tar::EntryType::new(kind));
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(text.len() as u64 + 1);
    header.set_cksum();
    tar.append(&header, text.chain(&[0][..]))
}

/// The bytes of a file as long as it was when it was opened; an error when it changes meanwhile.
#[derive(Debug)]
pub struct Whole {
    file: File,
    before: Metadata,
    left: u64,
}

impl Whole {
    /// A regular file, from its start.
    ///
    /// # Errors
    /// It is none, or cannot be looked at.
    pub fn of(file: File) -> io::Result<Self> {
        let before = file.metadata()?;
        if !before.is_file() {
            return Err(io::Error::other("it was replaced while it was read"));
        }
        Ok(Self { file, left: before.len(), before })
    }

    /// Whether parts of it take nothing of the disk.
    fn has_holes(&self) -> bool {
        self.before.blocks() * BLOCK < self.before.len()
    }

    /// Makes sure that it is as it was, but for what was added at its end.
    fn unchanged(&self) -> io::Result<()> {
        let now = self.file.metadata()?;
        let time = |metadata: &Metadata| (metadata.mtime(), metadata.mtime_nsec());
        match now.len().cmp(&self.before.len()) {
            Ordering::Less => Err(io::Error::other("it became shorter while it was read")),
            Ordering::Equal if time(&now) != time(&self.before) => {
                Err(io::Error::other("it changed while it was read"))
            }
            _ => Ok(()),
        }
    }

    /// How many bytes it had.
    pub fn len(&self) -> u64 {
        self.before.len()
    }
}

impl Read for Whole {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 || buffer.is_empty() {
            return self.unchanged().map(|()| 0);
        }
        let most = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        match self.file.read(&mut buffer[..most])? {
            0 => Err(io::Error::other("it became shorter while it was read")),
            n => {
                self.left -= n as u64;
                Ok(n)
            }
        }
    }
}

/// What was left out of a stream.
#[derive(Debug)]
pub struct LeftOut {
    /// What these are, one of them and more.
    kind: [&'static str; 2],
    count: u64,
    first: PathBuf,
}

impl Default for LeftOut {
    fn default() -> Self {
        Self::sockets()
    }
}

impl LeftOut {
    /// No socket so far.
    pub const fn sockets() -> Self {
        Self { kind: ["socket", "sockets"], count: 0, first: PathBuf::new() }
    }

    /// No special file so far.
    pub const fn special() -> Self {
        Self { kind: ["pipe or device", "pipes and devices"], count: 0, first: PathBuf::new() }
    }

    /// One more.
    pub fn add(&mut self, path: &Path) {
        if self.count == 0 {
            path.clone_into(&mut self.first);
        }
        self.count += 1;
    }

    /// Says what it is on standard error, if anything.
    pub fn tell(&self) {
        if let Some(warning) = self.warning() {
            tell(format_args!("corral: {warning}\n"));
        }
    }

    /// What to say of it, if anything. Names may be those of a sandbox.
    fn warning(&self) -> Option<String> {
        let ([one, more], first) = (self.kind, printable(&self.first.to_string_lossy()));
        match self.count {
            0 => None,
            1 => Some(format!("the {one} {first} is left out")),
            count => Some(format!("{count} {more} are left out, the first of them {first}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn packed(dir: &Path) -> (anyhow::Result<()>, Vec<u8>, LeftOut) {
        let (mut bytes, mut left) = (Vec::new(), LeftOut::sockets());
        let done = pack(dir, &mut bytes, |_, _| Choice::ALL, |path| left.add(path));
        (done, bytes, left)
    }

    #[test]
    fn names_and_links_are_sent_byte_for_byte() {
        let dir = tempfile::tempdir().unwrap();
        let long = [b"\xff".repeat(120), b"caf\xe9".to_vec()].concat();
        for name in [&b"caf\xe9"[..], &long, b"plain"] {
            fs::write(dir.path().join(OsStr::from_bytes(name)), name).unwrap();
        }
        let target = OsStr::from_bytes(b".//caf\xe9");
        std::os::unix::fs::symlink(target, dir.path().join("link")).unwrap();
        let (done, bytes, _) = packed(dir.path());
        done.unwrap();
        let mut archive = tar::Archive::new(bytes.as_slice());
        let mut found = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let (name, link) = (entry.path_bytes().into_owned(), entry.link_name_bytes().map(|l| l.into_owned()));
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            found.push((name, link.unwrap_or(content)));
        }
        let same = |name: &[u8]| (name.to_vec(), name.to_vec());
        let link = (b"link".to_vec(), b".//caf\xe9".to_vec());
        assert_eq!(found, [(b"./".to_vec(), Vec::new()), same(b"caf\xe9"), link, same(b"plain"), same(&long)]);
    }

    #[test]
    fn holes_are_not_sent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(OsStr::from_bytes(b"caf\xe9"));
        let file = File::create(&path).unwrap();
        file.set_len(64 << 20).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"end", (64 << 20) - 3).unwrap();
        let (done, bytes, _) = packed(dir.path());
        done.unwrap();
        assert!(bytes.len() < 1 << 20, "{}", bytes.len());
        let mut archive = tar::Archive::new(bytes.as_slice());
        let mut entry = archive.entries().unwrap().nth(1).unwrap().unwrap();
        assert_eq!(entry.path_bytes().as_ref(), b"caf\xe9");
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        assert!(content.len() == 64 << 20 && content.ends_with(b"\0end"));
    }

    #[test]
    fn sockets_are_left_out_and_counted() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "x").unwrap();
        assert_eq!(packed(dir.path()).2.warning(), None);
        let _one = UnixListener::bind(dir.path().join("a.sock")).unwrap();
        let (done, _, left) = packed(dir.path());
        done.unwrap();
        assert_eq!(left.warning().unwrap(), format!("the socket {}/a.sock is left out", dir.path().display()));
        let _two = UnixListener::bind(dir.path().join("b.sock")).unwrap();
        let (_, bytes, left) = packed(dir.path());
        assert!(left.warning().unwrap().starts_with("2 sockets are left out, the first of them /"));
        assert_eq!(tar::Archive::new(bytes.as_slice()).entries().unwrap().count(), 2);
    }

    #[test]
    fn what_is_told_of_names_does_not_steer_a_terminal() {
        let mut left = LeftOut::special();
        left.add(Path::new("a\u{1b}[2Jb"));
        assert_eq!(left.warning().unwrap(), "the pipe or device a\u{fffd}[2Jb is left out");
    }

    #[test]
    fn a_file_that_changes_while_it_is_read_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let begun = || {
            fs::write(&path, "content").unwrap();
            let mut whole = Whole::of(File::open(&path).unwrap()).unwrap();
            whole.read_exact(&mut [0; 2]).unwrap();
            (whole, File::options().write(true).open(&path).unwrap())
        };
        let said = |mut whole: Whole| io::copy(&mut whole, &mut io::sink()).map_err(|e| e.to_string());
        let (whole, file) = begun();
        file.set_len(3).unwrap();
        assert_eq!(said(whole), Err("it became shorter while it was read".to_owned()));
        let (whole, file) = begun();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(said(whole), Err("it changed while it was read".to_owned()));
        let (whole, file) = begun();
        file.set_len(9).unwrap();
        assert_eq!(said(whole), Ok(5), "as long as it was");
        fs::remove_file(&path).unwrap();
        let said = format!("{:#}", packed(&path).0.unwrap_err());
        assert!(said.starts_with(&format!("cannot read {}: ", path.display())), "{said}");
    }
}
