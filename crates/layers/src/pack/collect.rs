//! What a walk met, as the tree of a layer.

use super::content::Content;
use crate::config::CancelFlag;
use crate::error::ImportError;
use crate::scrub::Scrub;
use crate::walk::{self, Entry, Visitor, is_opaque};
use corral_format::CHUNK;
use corral_format::erofs::{Kind, Meta, Node, NodeId, Tree};
use rustix::fs::{Advice, FileType, Mode, OFlags, Stat};
use std::collections::HashMap;
use std::ffi::CString;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::path::Path;

/// A tree that was walked.
pub(super) struct Walked {
    pub(super) tree: Tree,
    pub(super) tally: Tally,
}

/// What a walk met.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Entries below the root.
    pub(crate) entries: u64,
    /// Whiteouts and opaque directories among them.
    pub(crate) deletions: u64,
    /// Paths that were left out: the first of them.
    pub(crate) scrubbed: Vec<String>,
    /// How many were left out.
    pub(crate) scrubbed_count: u64,
}

impl Tally {
    /// Most paths that are named.
    const NAMED: usize = 100;

    fn leave_out(&mut self, path: &[u8]) {
        self.scrubbed_count += 1;
        if self.scrubbed.len() < Self::NAMED {
            self.scrubbed.push(format!("/{}", String::from_utf8_lossy(path)));
        }
    }
}

/// A directory in the making.
struct Open {
    name: Vec<u8>,
    meta: Meta,
    done: Vec<(Vec<u8>, NodeId)>,
}

struct Collector<'a, 'c> {
    content: &'a mut Content<'c>,
    scrub: &'a Scrub,
    tree: Tree,
    /// Files with more than one name.
    linked: HashMap<(u64, u64), NodeId>,
    tally: Tally,
    open: Vec<Open>,
}

/// Walks the tree at `top`.
pub(super) fn collect(
    top: &Path,
    content: &mut Content<'_>,
    scrub: &Scrub,
    cancel: &CancelFlag,
) -> Result<Walked, ImportError> {
    let (tree, tally) = (Tree::new(), Tally::default());
    let mut collector = Collector { content, scrub, tree, linked: HashMap::new(), tally, open: Vec::new() };
    walk::walk(top, &mut collector, cancel)?;
    Ok(Walked { tree: collector.tree, tally: collector.tally })
}

impl Visitor for Collector<'_, '_> {
    fn wants(&mut self, path: &[u8]) -> bool {
        let wanted = !self.scrub.matches(path);
        if wanted {
            self.tally.entries += 1;
        } else {
            self.tally.leave_out(path);
        }
        wanted
    }

    fn enter(&mut self, entry: &Entry<'_>) -> Result<(), ImportError> {
        let meta = Meta { xattrs: entry.xattrs()?, ..meta_of(entry.stat) };
        self.tally.deletions += u64::from(!self.open.is_empty() && is_opaque(&meta.xattrs));
        self.open.push(Open { name: entry.file_name().to_vec(), meta, done: Vec::new() });
        Ok(())
    }

    fn leaf(&mut self, entry: &Entry<'_>) -> Result<(), ImportError> {
        if let Some(id) = self.node(entry)?
            && let Some(parent) = self.open.last_mut()
        {
            parent.done.push((entry.file_name().to_vec(), id));
        }
        Ok(())
    }

    /// Most trees are many small files, each of which the disk would be waited for.
    fn ahead(&mut self, dir: &OwnedFd, names: &[CString]) {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        for name in names.iter().rev() {
            // What cannot be read is told when its turn comes.
            if let Ok(file) = rustix::fs::openat(dir, name, flags, Mode::empty()) {
                rustix::fs::fadvise(&file, 0, NonZeroU64::new(CHUNK), Advice::WillNeed).unwrap_or(());
            }
        }
    }

    fn leave(&mut self) {
        let Some(Open { name, meta, done }) = self.open.pop() else { return };
        let id = self.tree.add(Node { meta, kind: Kind::Directory(done) });
        if let Some(parent) = self.open.last_mut() {
            parent.done.push((name, id));
        }
    }
}

impl Collector<'_, '_> {
    /// Anything but a directory. Sockets are of no use in a layer.
    fn node(&mut self, entry: &Entry<'_>) -> Result<Option<NodeId>, ImportError> {
        let stat = entry.stat;
        let identity = (stat.st_dev, stat.st_ino);
        if stat.st_nlink > 1
            && let Some(id) = self.linked.get(&identity)
        {
            return Ok(Some(*id));
        }
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let size = stat.st_size as u64;
                let blocks = self.content.add(&entry.open()?, size).map_err(|e| entry.failed(e))?;
                Kind::File { size, blocks }
            }
            FileType::Symlink => Kind::Link(entry.target()?),
            FileType::Socket => return Ok(None),
            _ if entry.is_whiteout() => {
                self.tally.deletions += 1;
                Kind::Special(0)
            }
            _ => Kind::Special(encode_device(stat.st_rdev)),
        };
        let meta = Meta { xattrs: entry.xattrs()?, ..meta_of(stat) };
        let id = self.tree.add(Node { meta, kind });
        if stat.st_nlink > 1 {
            self.linked.insert(identity, id);
        }
        Ok(Some(id))
    }
}

fn meta_of(stat: &Stat) -> Meta {
    Meta {
        mode: stat.st_mode as u16,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime: (stat.st_mtime, stat.st_mtime_nsec as u32),
        xattrs: Vec::new(),
    }
}

/// The kernel's 32-bit encoding of a device number (`new_encode_dev`).
fn encode_device(device: u64) -> u32 {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}
