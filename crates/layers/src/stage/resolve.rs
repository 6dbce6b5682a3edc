//! Finding the directory that an entry lies in, inside the image and nowhere else.

use super::{Dir, Stage, StageError};
use crate::error::EntryFault;
use crate::paths;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::rc::Rc;

/// As many links as the kernel follows (`MAXSYMLINKS`, path_resolution(7)).
const MAX_SYMLINKS: usize = 40;

enum Step {
    Directory,
    Link(Vec<u8>),
    NotADirectory,
    Absent,
}

impl Stage {
    /// The directory at these components, made where it is missing.
    pub(super) fn resolve_parent(&mut self, parts: &[&[u8]]) -> Result<Dir, StageError> {
        if parts.is_empty() {
            return Ok(self.root_dir());
        }
        let written = parts.join(&b'/');
        if let Some((key, dir)) = &self.last
            && *key == written
        {
            return Ok(dir.clone());
        }
        let dir = match self.open_dir(&written) {
            Ok(fd) => Dir { path: Rc::from(written.as_slice()), fd },
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                let path = self.walk(parts, true)?.ok_or(EntryFault::NotADirectory)?;
                Dir { fd: self.open_dir(&path)?, path: Rc::from(path) }
            }
            Err(e) => return Err(e.into()),
        };
        self.last = Some((written, dir.clone()));
        Ok(dir)
    }

    /// Canonical path of the directory at these components, in the stage or beneath; nothing is made.
    pub(super) fn lookup_dir(&mut self, parts: &[&[u8]]) -> Result<Option<Vec<u8>>, StageError> {
        self.walk(parts, false)
    }

    fn walk(&mut self, parts: &[&[u8]], make: bool) -> Result<Option<Vec<u8>>, StageError> {
        let mut queue: VecDeque<Vec<u8>> = parts.iter().map(|p| p.to_vec()).collect();
        let mut at: Vec<u8> = Vec::new();
        let mut links = 0;
        while let Some(part) = queue.pop_front() {
            match part.as_slice() {
                b"" | b"." => continue,
                b".." => {
                    let up = at.iter().rposition(|b| *b == b'/').unwrap_or(0);
                    at.truncate(up);
                    continue;
                }
                _ => {}
            }
            let next = paths::join(&at, &part);
            if next.len() > paths::MAX_PATH_BYTES {
                return Err(EntryFault::PathTooLong(paths::MAX_PATH_BYTES).into());
            }
            match self.step(&at, &next)? {
                Step::Directory if make => {
                    let parent = Dir { fd: self.open_dir(&at)?, path: Rc::from(at.as_slice()) };
                    self.ensure_dir(&parent, &part)?;
                    at = next;
                }
                Step::Directory => at = next,
                Step::Link(target) => {
                    links += 1;
                    if links > MAX_SYMLINKS {
                        return Err(EntryFault::SymlinkLoop.into());
                    }
                    if target.first() == Some(&b'/') {
                        at.clear();
                    }
                    for piece in target.split(|b| *b == b'/').rev() {
                        queue.push_front(piece.to_vec());
                    }
                }
                Step::NotADirectory if make => return Err(EntryFault::NotADirectory.into()),
                Step::Absent if make => {
                    if part.len() > 255 {
                        return Err(EntryFault::NameTooLong.into());
                    }
                    let parent = Dir { fd: self.open_dir(&at)?, path: Rc::from(at.as_slice()) };
                    self.ensure_dir(&parent, &part)?;
                    at = next;
                }
                Step::NotADirectory | Step::Absent => return Ok(None),
            }
        }
        Ok(Some(at))
    }

    /// What lies at `next`, a child of `at`, as the merged image shows it.
    fn step(&self, at: &[u8], next: &[u8]) -> Result<Step, StageError> {
        if let Some(stat) = self.stat_stage(next)? {
            return Ok(match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => Step::Directory,
                FileType::Symlink => {
                    let fd = self.open_beneath(next, OFlags::PATH | OFlags::NOFOLLOW)?;
                    Step::Link(rustix::fs::readlinkat(&fd, c"", Vec::new())?.into_bytes())
                }
                FileType::CharacterDevice => Step::Absent,
                _ => Step::NotADirectory,
            });
        }
        let Some(lower) = self.lower_at(at) else { return Ok(Step::Absent) };
        let Some(fd) = lower.open_path(next, OFlags::PATH)? else { return Ok(Step::Absent) };
        let stat = rustix::fs::statat(&fd, c"", AtFlags::EMPTY_PATH)?;
        Ok(match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => Step::Directory,
            FileType::Symlink => Step::Link(rustix::fs::readlinkat(&fd, c"", Vec::new())?.into_bytes()),
            _ => Step::NotADirectory,
        })
    }

    /// Makes a directory that is only implied, with the metadata of the one beneath; one that exists stays.
    fn ensure_dir(&mut self, parent: &Dir, name: &[u8]) -> Result<(), StageError> {
        let path = paths::join(&parent.path, name);
        if let Some(stat) = self.stat_stage(&path)?
            && FileType::from_raw_mode(stat.st_mode) == FileType::Directory
        {
            return Ok(());
        }
        let dir = self.make_dir(parent, name)?;
        let meta = self.implied_meta(&path)?;
        self.implied += 1;
        self.set_dir_meta(&dir, &meta)
    }

    /// Makes a directory, or opens the one that exists. One that replaces something is opaque.
    pub(super) fn make_dir(&mut self, parent: &Dir, name: &[u8]) -> Result<Dir, StageError> {
        let path = paths::join(&parent.path, name);
        let found = match rustix::fs::statat(&*parent.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Some(FileType::from_raw_mode(stat.st_mode)),
            Err(Errno::NOENT) => None,
            Err(e) => return Err(e.into()),
        };
        if found == Some(FileType::Directory) {
            return Ok(Dir { fd: self.open_dir(&path)?, path: Rc::from(path) });
        }
        if found.is_some() {
            self.clear_place(parent, name)?;
        }
        rustix::fs::mkdirat(&*parent.fd, name, Mode::from_raw_mode(0o700))?;
        let dir = Dir { fd: self.open_dir(&path)?, path: Rc::from(path.as_slice()) };
        if found.is_some() {
            self.make_opaque(&dir)?;
        }
        Ok(dir)
    }
}
