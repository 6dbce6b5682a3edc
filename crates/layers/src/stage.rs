//! The staging directory of one run: where entries of source layers are put, in order, until it is packed.
//!
//! Every path is resolved component by component inside the image (stage first, stored layers beneath second), links
//! included, as if the stage were the root directory: nothing an archive holds can make it lead out. What is resolved
//! is canonical (free of links), and the kernel is then asked for exactly that path with
//! `openat2(RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS)`.
//!
//! Invariants towards the stored layers beneath, which make the finished tree a correct overlayfs upper directory:
//! - a whiteout exists only where the merged view beneath shows something;
//! - a directory that replaces what hid or was not a directory is opaque;
//! - a directory made only because something lies in it has the metadata of the one beneath.

mod meta;
mod remove;
mod resolve;

use crate::error::EntryFault;
use crate::lower::LowerView;
use crate::paths;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

pub(crate) use meta::{Meta, keeps_xattr, mtime_of, read_full, read_xattrs};

pub(crate) const OPAQUE: &str = "trusted.overlay.opaque";

/// An entry could not be put.
#[derive(Debug)]
pub(crate) enum StageError {
    /// The entry is at fault.
    Fault(EntryFault),
    /// The host is.
    Io(io::Error),
}

impl From<EntryFault> for StageError {
    fn from(fault: EntryFault) -> Self {
        Self::Fault(fault)
    }
}

impl From<io::Error> for StageError {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

impl From<Errno> for StageError {
    fn from(e: Errno) -> Self {
        Self::Io(e.into())
    }
}

/// A resolved directory of the stage.
#[derive(Clone)]
pub(crate) struct Dir {
    /// Canonical path; empty for the root.
    path: Rc<[u8]>,
    fd: Rc<OwnedFd>,
}

/// One run's tree in the making.
pub(crate) struct Stage {
    root: Rc<OwnedFd>,
    host_path: PathBuf,
    lower: Option<LowerView>,
    /// Canonical paths put by the current source layer.
    touched: BTreeSet<Vec<u8>>,
    /// Canonical paths of opaque directories: nothing beneath shows through them.
    opaque: BTreeSet<Vec<u8>>,
    /// Times to give to directories at the end, after everything is put into them.
    dir_times: BTreeMap<Vec<u8>, (i64, u32)>,
    /// The last directory resolved, by its name as written.
    last: Option<(Vec<u8>, Dir)>,
    /// Directories made because something lies in them.
    implied: u64,
}

impl Stage {
    /// Makes an empty stage at a path that does not exist, over the stored layers beneath it.
    ///
    /// # Errors
    /// The host refuses.
    pub(crate) fn create(host_path: &Path, lower: Option<LowerView>) -> Result<Self, StageError> {
        rustix::fs::mkdir(host_path, Mode::from_raw_mode(0o755))?;
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let root = Rc::new(rustix::fs::open(host_path, flags, Mode::empty())?);
        let mut stage = Self {
            root,
            host_path: host_path.to_owned(),
            lower,
            touched: BTreeSet::new(),
            opaque: BTreeSet::new(),
            dir_times: BTreeMap::new(),
            last: None,
            implied: 0,
        };
        let meta = stage.implied_meta(b"")?;
        stage.set_dir_meta(&stage.root_dir(), &meta)?;
        Ok(stage)
    }

    /// Forgets what the last source layer put: the next one may delete it.
    pub(crate) fn begin_layer(&mut self) {
        self.touched.clear();
        self.last = None;
    }

    /// Directories made so far only because something lies in them.
    pub(crate) fn implied(&self) -> u64 {
        self.implied
    }

    /// Where the tree lies on the host.
    pub(crate) fn host_path(&self) -> &Path {
        &self.host_path
    }

    fn root_dir(&self) -> Dir {
        Dir { path: Rc::from(&b""[..]), fd: Rc::clone(&self.root) }
    }

    /// Puts a directory; one that exists keeps its content and takes the new metadata.
    pub(crate) fn put_dir(&mut self, parts: &[&[u8]], meta: &Meta) -> Result<(), StageError> {
        let Some((name, parent)) = parts.split_last() else {
            let root = self.root_dir();
            return self.set_dir_meta(&root, meta);
        };
        let parent = self.resolve_parent(parent)?;
        let dir = self.make_dir(&parent, name)?;
        self.touch(&dir.path);
        self.set_dir_meta(&dir, meta)
    }

    /// Makes a file for the caller to fill; finish it with [`Stage::finish_file`].
    pub(crate) fn create_file(&mut self, parts: &[&[u8]]) -> Result<OwnedFd, StageError> {
        let (parent, name) = self.make_room(parts)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&*parent.fd, name, flags, Mode::from_raw_mode(0o600))?)
    }

    /// Puts a symbolic link. Its target is content and never followed on the host.
    pub(crate) fn put_symlink(&mut self, parts: &[&[u8]], target: &[u8], meta: &Meta) -> Result<(), StageError> {
        if target.is_empty() || target.contains(&0) {
            return Err(EntryFault::BadHeader("link target").into());
        }
        let (parent, name) = self.make_room(parts)?;
        rustix::fs::symlinkat(target, &*parent.fd, name)?;
        meta::set_link_meta(&parent.fd, name, meta)
    }

    /// Puts a FIFO.
    pub(crate) fn put_fifo(&mut self, parts: &[&[u8]], meta: &Meta) -> Result<(), StageError> {
        let (parent, name) = self.make_room(parts)?;
        rustix::fs::mknodat(&*parent.fd, name, FileType::Fifo, Mode::from_raw_mode(0o600), 0)?;
        meta::set_node_meta(&parent.fd, name, meta)
    }

    /// Puts a hard link to a file of the stage or, copied up, of a stored layer beneath.
    pub(crate) fn put_hardlink(&mut self, parts: &[&[u8]], target: &[u8]) -> Result<(), StageError> {
        let text = || paths::display(target);
        let target_parts = paths::components(target).map_err(|_| EntryFault::LinkOutside { target: text() })?;
        let missing = || StageError::from(EntryFault::LinkMissing { target: text() });
        let Some((target_name, target_parent)) = target_parts.split_last() else {
            return Err(EntryFault::LinkToDirectory { target: text() }.into());
        };
        let source_path = self.lookup_dir(target_parent)?.ok_or_else(missing)?;
        let source_full = paths::join(&source_path, target_name);
        let found = self.stat_stage(&source_full)?;
        match found.as_ref().map(|s| FileType::from_raw_mode(s.st_mode)) {
            Some(FileType::Directory) => return Err(EntryFault::LinkToDirectory { target: text() }.into()),
            Some(FileType::CharacterDevice) => return Err(missing()),
            Some(_) => {}
            None => self.copy_up(&source_path, target_name, &source_full)?.ok_or_else(missing)?,
        }
        let source_dir = self.open_dir(&source_path)?;
        let (name, parent) = parts.split_last().ok_or(EntryFault::ReplacesRoot)?;
        let parent = self.resolve_parent(parent)?;
        if paths::join(&parent.path, name) == source_full {
            return Ok(());
        }
        self.clear_place(&parent, name)?;
        // Clearing may have removed the target itself, where it lay in a directory of that name.
        match rustix::fs::linkat(&*source_dir, *target_name, &*parent.fd, *name, AtFlags::empty()) {
            Ok(()) => {}
            Err(Errno::NOENT) => return Err(missing()),
            Err(e) => return Err(e.into()),
        }
        self.touch(&paths::join(&parent.path, name));
        Ok(())
    }

    /// Makes way for a non-directory and marks its path.
    fn make_room<'n>(&mut self, parts: &[&'n [u8]]) -> Result<(Dir, &'n [u8]), StageError> {
        let (name, parent) = parts.split_last().ok_or(EntryFault::ReplacesRoot)?;
        let parent = self.resolve_parent(parent)?;
        self.clear_place(&parent, name)?;
        self.touch(&paths::join(&parent.path, name));
        Ok((parent, name))
    }

    /// Marks a path and the directories above it as put by the current layer.
    fn touch(&mut self, path: &[u8]) {
        let mut path = path;
        while !path.is_empty() && self.touched.insert(path.to_vec()) {
            path = paths::parent(path);
        }
    }

    /// Whether stored layers beneath show through at this canonical directory.
    fn lower_at(&self, dir: &[u8]) -> Option<&LowerView> {
        let mut at = dir;
        while !at.is_empty() && !self.opaque.is_empty() {
            if self.opaque.contains(at) {
                return None;
            }
            at = paths::parent(at);
        }
        // The root may be opaque as well.
        self.lower.as_ref().filter(|_| !self.opaque.contains(at))
    }

    fn stat_stage(&self, path: &[u8]) -> rustix::io::Result<Option<Stat>> {
        match self.open_beneath(path, OFlags::PATH | OFlags::NOFOLLOW) {
            Ok(fd) => rustix::fs::statat(&fd, c"", AtFlags::EMPTY_PATH).map(Some),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn open_dir(&self, path: &[u8]) -> rustix::io::Result<Rc<OwnedFd>> {
        if path.is_empty() {
            return Ok(Rc::clone(&self.root));
        }
        self.open_beneath(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW).map(Rc::new)
    }

    fn open_beneath(&self, path: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let path: &[u8] = if path.is_empty() { b"." } else { path };
        rustix::fs::openat2(&*self.root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
    }
}
