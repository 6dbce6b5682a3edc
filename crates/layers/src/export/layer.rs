//! A stored layer as the tar stream of an OCI layer: deletions become `.wh.` files.

use crate::config::CancelFlag;
use crate::error::ImportError;
use crate::lower::LowerView;
use crate::stage::{keeps_xattr, mtime_of};
use crate::walk::{self, Entry, Visitor, Xattr, is_opaque};
use rustix::fs::FileType;
use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;

/// Begins the name of a file that stands for a deletion.
const WHITEOUT: &[u8] = b".wh.";
/// The file that stands for the deletion of all that lower layers have in its directory.
const OPAQUE_FILE: &[u8] = b".wh..wh..opq";

/// Writes a layer. Equal layers give equal bytes.
pub(super) fn write(view: &LowerView, out: impl Write, cancel: &CancelFlag) -> Result<(), ImportError> {
    let mut writer = Writer { tar: tar::Builder::new(out), linked: HashMap::new(), cancel };
    walk::walk(&view.top(), &mut writer, cancel)?;
    let ended = writer.tar.into_inner().and_then(|mut out| out.flush());
    ended.map_err(|e| ImportError::io("write", Path::new("a layer"), e))
}

struct Writer<'a, W: Write> {
    cancel: &'a CancelFlag,
    tar: tar::Builder<W>,
    /// The first name of files with more than one.
    linked: HashMap<(u64, u64), Vec<u8>>,
}

impl<W: Write> Visitor for Writer<'_, W> {
    fn wants(&mut self, _path: &[u8]) -> bool {
        true
    }

    fn enter(&mut self, entry: &Entry<'_>) -> Result<(), ImportError> {
        let xattrs = entry.xattrs()?;
        let mut name = if entry.path.is_empty() { b"./".to_vec() } else { named(entry)? };
        if !entry.path.is_empty() {
            name.push(b'/');
        }
        self.put(entry, &xattrs, tar::EntryType::Directory, &name, None)?;
        if is_opaque(&xattrs) && !entry.path.is_empty() {
            self.stand_in(entry, &[&name, OPAQUE_FILE].concat())?;
        }
        Ok(())
    }

    fn leaf(&mut self, entry: &Entry<'_>) -> Result<(), ImportError> {
        if entry.is_whiteout() {
            let at = entry.path.len() - entry.file_name().len();
            return self.stand_in(entry, &[&entry.path[..at], WHITEOUT, &entry.path[at..]].concat());
        }
        let name = named(entry)?;
        let identity = (entry.stat.st_dev, entry.stat.st_ino);
        if entry.stat.st_nlink > 1 {
            if let Some(first) = self.linked.get(&identity).cloned() {
                return self.put(entry, &[], tar::EntryType::Link, &name, Some(&first));
            }
            self.linked.insert(identity, name.clone());
        }
        let xattrs = entry.xattrs()?;
        match FileType::from_raw_mode(entry.stat.st_mode) {
            FileType::RegularFile => self.put(entry, &xattrs, tar::EntryType::Regular, &name, None),
            FileType::Symlink => self.put(entry, &xattrs, tar::EntryType::Symlink, &name, Some(&entry.target()?)),
            FileType::Fifo => self.put(entry, &xattrs, tar::EntryType::Fifo, &name, None),
            FileType::CharacterDevice => self.put(entry, &xattrs, tar::EntryType::Char, &name, None),
            FileType::BlockDevice => self.put(entry, &xattrs, tar::EntryType::Block, &name, None),
            // No layer holds a socket.
            _ => Ok(()),
        }
    }

    fn leave(&mut self) {}
}

/// The entry's path, which must not mean something else in an archive.
fn named(entry: &Entry<'_>) -> Result<Vec<u8>, ImportError> {
    if entry.file_name().starts_with(WHITEOUT) {
        let path = String::from_utf8_lossy(entry.path);
        let text = format!("the image cannot be exported: the name of /{path} means a deletion in an archive");
        return Err(ImportError::InvalidRequest(text));
    }
    Ok(entry.path.to_vec())
}

impl<W: Write> Writer<'_, W> {
    /// An empty file that stands for a deletion.
    fn stand_in(&mut self, entry: &Entry<'_>, name: &[u8]) -> Result<(), ImportError> {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Regular);
        header.set_mode(0o600);
        header.set_mtime(0);
        header.set_size(0);
        header.set_uid(0);
        header.set_gid(0);
        self.tar.append_data(&mut header, path_of(name), io::empty()).map_err(|e| entry.failed(e))
    }

    /// A link with its target as it is: `append_link` would tidy it.
    fn link(&mut self, header: &mut tar::Header, name: &[u8], target: &[u8]) -> io::Result<()> {
        /// Longest target in a header.
        const SHORT: usize = 100;
        if target.len() > SHORT {
            let mut long = tar::Header::new_gnu();
            long.as_mut_bytes()[..13].copy_from_slice(b"././@LongLink");
            long.set_entry_type(tar::EntryType::GNULongLink);
            long.set_mode(0o644);
            long.set_uid(0);
            long.set_gid(0);
            long.set_mtime(0);
            long.set_size(target.len() as u64 + 1);
            long.set_cksum();
            self.tar.append(&long, target.chain(&b"\0"[..]))?;
        }
        header.set_link_name_literal(&target[..target.len().min(SHORT)])?;
        self.tar.append_data(header, path_of(name), io::empty())
    }

    fn put(
        &mut self,
        entry: &Entry<'_>,
        xattrs: &[Xattr],
        kind: tar::EntryType,
        name: &[u8],
        target: Option<&[u8]>,
    ) -> Result<(), ImportError> {
        let stat = entry.stat;
        let failed = |e: io::Error| entry.failed(e);
        let (seconds, nanoseconds) = mtime_of(stat);
        let mut extensions: Vec<(String, Vec<u8>)> = Vec::new();
        if nanoseconds > 0 {
            extensions.push(("mtime".into(), format!("{seconds}.{nanoseconds:09}").into_bytes()));
        }
        for (name, value) in xattrs.iter().filter(|(name, _)| keeps_xattr(name)) {
            extensions.push((format!("SCHILY.xattr.{}", attribute(entry, name)?), value.clone()));
        }
        if !extensions.is_empty() {
            let extensions = extensions.iter().map(|(name, value)| (name.as_str(), value.as_slice()));
            self.tar.append_pax_extensions(extensions).map_err(failed)?;
        }
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(stat.st_mode & 0o7777);
        header.set_uid(stat.st_uid.into());
        header.set_gid(stat.st_gid.into());
        header.set_mtime(seconds as u64);
        header.set_size(0);
        if matches!(kind, tar::EntryType::Char | tar::EntryType::Block) {
            header.set_device_major(rustix::fs::major(stat.st_rdev)).map_err(failed)?;
            header.set_device_minor(rustix::fs::minor(stat.st_rdev)).map_err(failed)?;
        }
        match target {
            Some(target) => self.link(&mut header, name, target).map_err(failed),
            None if kind == tar::EntryType::Regular => {
                header.set_size(stat.st_size as u64);
                let content = Cancellable { inner: entry.open()?, cancel: self.cancel };
                let put = self.tar.append_data(&mut header, path_of(name), content);
                put.map_err(|e| if self.cancel.is_cancelled() { ImportError::Cancelled } else { failed(e) })
            }
            None => self.tar.append_data(&mut header, path_of(name), io::empty()).map_err(failed),
        }
    }
}

/// The name of an attribute, which must not mean something else in an archive.
fn attribute<'n>(entry: &Entry<'_>, name: &'n [u8]) -> Result<&'n str, ImportError> {
    let text = std::str::from_utf8(name).ok().filter(|name| !name.contains(['=', '\n']));
    text.ok_or_else(|| {
        let (path, name) = (String::from_utf8_lossy(entry.path), String::from_utf8_lossy(name));
        let text = format!("the image cannot be exported: no archive can hold the attribute {name:?} of /{path}");
        ImportError::InvalidRequest(text)
    })
}

/// A file that ends with an error when the work is given up.
struct Cancellable<'a, R> {
    inner: R,
    cancel: &'a CancelFlag,
}

impl<R: Read> Read for Cancellable<'_, R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.cancel.is_cancelled() { Err(io::Error::other("given up")) } else { self.inner.read(out) }
    }
}

/// A name for the crate `tar`: of one that has no room in a header it leaves there the text that the name begins with, and
/// refuses that to be nothing. Below `./` it is something, and every reader leaves that out.
fn path_of(name: &[u8]) -> Cow<'_, Path> {
    match name {
        [first, ..] if !first.is_ascii() => Cow::Owned(OsString::from_vec([b"./", name].concat()).into()),
        _ => Cow::Borrowed(Path::new(OsStr::from_bytes(name))),
    }
}
