//! Lists a directory store in pages, without holding more than one page and one directory for each level.

use super::files::{Root, meta_of, open_beneath};
use crate::error::StoreError;
use crate::key::{Key, check_segment};
use crate::store::ListEntry;
use rustix::fs::{AtFlags, Dir, FileType, OFlags};
use rustix::io::Errno;
use std::os::fd::AsFd;

/// Entries of a page.
const PAGE: usize = 1000;

/// A walk that stands still between pages.
pub(super) struct Walk {
    start: Option<Option<Key>>,
    /// Directories that are being read, each with its key and a slash.
    open: Vec<(Dir, String)>,
}

impl Walk {
    pub(super) fn below(prefix: Option<Key>) -> Self {
        Self { start: Some(prefix), open: Vec::new() }
    }

    /// The next entries; none at the end.
    pub(super) fn page(&mut self, root: &Root) -> Result<Vec<ListEntry>, StoreError> {
        if let Some(prefix) = self.start.take() {
            let (path, name) = match &prefix {
                Some(key) => (key.as_str(), format!("{key}/")),
                None => (".", String::new()),
            };
            self.enter(root.dir().as_fd(), path, name)?;
        }
        let mut page = Vec::new();
        while page.len() < PAGE {
            let Some((dir, above)) = self.open.last_mut() else { break };
            let Some(entry) = dir.read() else {
                self.open.pop();
                continue;
            };
            let entry = entry.map_err(|errno| StoreError::io("list", above.as_str(), errno))?;
            // Names that are no keys are not of this store.
            let Some(name) = entry.file_name().to_str().ok().filter(|name| check_segment(name).is_ok()) else {
                continue;
            };
            let Ok(key) = Key::parse(format!("{above}{name}")) else { continue };
            let fd = dir.fd().map_err(|errno| StoreError::io("list", above.as_str(), errno))?;
            if entry.file_type() == FileType::Directory {
                let fd = fd.try_clone_to_owned().map_err(|e| StoreError::io("list", above.as_str(), e))?;
                self.enter(fd.as_fd(), name, format!("{key}/"))?;
                continue;
            }
            match rustix::fs::statat(fd, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                    let fd = fd.try_clone_to_owned().map_err(|e| StoreError::io("list", above.as_str(), e))?;
                    self.enter(fd.as_fd(), name, format!("{key}/"))?;
                }
                Ok(stat) => page.extend(meta_of(&stat).map(|meta| ListEntry { key, meta })),
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(StoreError::io("list", key.as_str(), errno)),
            }
        }
        Ok(page)
    }

    /// Goes into a directory; one that is gone, or was none, holds nothing.
    fn enter(&mut self, above: rustix::fd::BorrowedFd<'_>, path: &str, name: String) -> Result<(), StoreError> {
        let opened = open_beneath(above, path, OFlags::RDONLY | OFlags::DIRECTORY).and_then(Dir::new);
        match opened {
            Ok(dir) => self.open.push((dir, name)),
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(errno) => return Err(StoreError::io("list", name, errno)),
        }
        Ok(())
    }
}
