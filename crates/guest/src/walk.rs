//! Walking a tree of any depth with one descriptor: down by name, up by `..`, checked against what was left.

use crate::paths::{failed, refused};
use crate::protocol::{OpError, OpErrorKind};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, fstat, openat, statat};
use rustix::io::Errno;
use std::ffi::{CStr, CString, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;

/// What a walk met.
#[derive(Debug)]
pub enum Step<'a> {
    /// An entry, before what lies below it.
    Entry {
        /// The directory it lies in.
        dir: &'a OwnedFd,
        /// Its name there.
        name: &'a CStr,
        /// Its path below the top, byte for byte: a name need not be UTF-8.
        relative: OsString,
        /// Its attributes.
        stat: Box<Stat>,
    },
    /// A directory after all that lies below it.
    Left {
        /// The directory it lies in.
        dir: &'a OwnedFd,
        /// Its name there.
        name: &'a CStr,
    },
}

#[derive(Debug)]
struct Frame {
    /// Which directory this is.
    identity: (u64, u64),
    /// Name in its parent, and length of the relative path up to here.
    name: CString,
    path_len: usize,
    /// Names still to visit, last first.
    names: Vec<CString>,
}

/// A walk in progress.
#[derive(Debug)]
pub struct Walk {
    top: String,
    dir: OwnedFd,
    frames: Vec<Frame>,
    relative: Vec<u8>,
    /// The entry given last is a directory to go into.
    enter: Option<CString>,
    current: CString,
}

/// Most names held at a time, over all levels.
const MAX_NAMES: usize = 4_000_000;

impl Walk {
    /// Begins at an open directory; `top` names it in errors.
    pub fn new(dir: OwnedFd, top: &str) -> Result<Self, OpError> {
        let frame = frame(&dir, CString::default(), 0).map_err(|e| failed(top, e))?;
        Ok(Self {
            top: top.to_owned(),
            dir,
            frames: vec![frame],
            relative: Vec::new(),
            enter: None,
            current: CString::default(),
        })
    }

    /// The next entry or directory end, going no deeper than `depth` levels; nothing at the end.
    pub fn next(&mut self, depth: usize) -> Result<Option<Step<'_>>, OpError> {
        if let Some(name) = self.enter.take()
            && self.frames.len() < depth
        {
            self.descend(name)?;
        }
        loop {
            let Some(frame) = self.frames.last_mut() else { return Ok(None) };
            let Some(name) = frame.names.pop() else {
                if self.frames.len() == 1 {
                    self.frames.clear();
                    return Ok(None);
                }
                self.ascend()?;
                return Ok(Some(Step::Left { dir: &self.dir, name: &self.current }));
            };
            let stat = match statat(&self.dir, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                // Removed meanwhile.
                Err(Errno::NOENT) => continue,
                Err(e) => return Err(failed(&self.top, e)),
            };
            self.relative.truncate(frame.path_len);
            if frame.path_len > 0 {
                self.relative.push(b'/');
            }
            self.relative.extend_from_slice(name.to_bytes());
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                self.enter = Some(name.clone());
            }
            self.current = name;
            return Ok(Some(Step::Entry {
                dir: &self.dir,
                name: &self.current,
                relative: OsString::from_vec(self.relative.clone()),
                stat: Box::new(stat),
            }));
        }
    }

    /// Does not go into the directory that was given last.
    pub fn stay_out(&mut self) {
        self.enter = None;
    }

    fn descend(&mut self, name: CString) -> Result<(), OpError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let dir = match openat(&self.dir, &name, flags, Mode::empty()) {
            Ok(dir) => dir,
            // Removed or replaced meanwhile.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
            Err(e) => return Err(failed(&self.top, e)),
        };
        let next = frame(&dir, name, self.relative.len()).map_err(|e| failed(&self.top, e))?;
        let held: usize = next.names.len() + self.frames.iter().map(|f| f.names.len()).sum::<usize>();
        if held > MAX_NAMES {
            return Err(refused(OpErrorKind::Limit, &self.top, "too many entries"));
        }
        self.frames.push(next);
        self.dir = dir;
        Ok(())
    }

    fn ascend(&mut self) -> Result<(), OpError> {
        let moved = || refused(OpErrorKind::Failed, &self.top, "a directory was moved while it was walked");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let parent = openat(&self.dir, "..", flags, Mode::empty()).map_err(|e| failed(&self.top, e))?;
        let stat = fstat(&parent).map_err(|e| failed(&self.top, e))?;
        let left = self.frames.pop().ok_or_else(moved)?;
        let expected = self.frames.last().ok_or_else(moved)?.identity;
        if (stat.st_dev, stat.st_ino) != expected {
            return Err(moved());
        }
        self.dir = parent;
        self.current = left.name;
        Ok(())
    }
}

fn frame(dir: &OwnedFd, name: CString, path_len: usize) -> Result<Frame, Errno> {
    let stat = fstat(dir)?;
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            names.push(entry.file_name().to_owned());
        }
    }
    names.sort_unstable_by(|a, b| b.cmp(a));
    Ok(Frame { identity: (stat.st_dev, stat.st_ino), name, path_len, names })
}
