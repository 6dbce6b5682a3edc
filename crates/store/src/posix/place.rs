//! How an object comes into a directory store: complete and synced first, then visible in one step.
//!
//! ```text
//! .tmp/NAME written ─ fsync ─▶ link to the object's name ─ fsync of directories ─▶ .tmp/NAME removed
//! ```

use super::files::{Root, open_beneath};
use crate::error::StoreError;
use crate::key::Key;
use crate::random::Rng;
use crate::source;
use crate::store::{Body, Put};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Where puts are made ready. No key begins with a dot.
pub(super) const TEMP_DIR: &str = ".tmp";
/// How much is copied between looks whether the caller is still there.
const PIECE_BYTES: u64 = 8 << 20;

/// Puts an object. Unless `replace`, one that is there stays.
pub(super) fn place(
    root: &Root,
    key: &Key,
    body: &Body,
    replace: bool,
    given_up: &AtomicBool,
) -> Result<Put, StoreError> {
    let io = |errno: Errno| failed("put", key.as_str(), errno);
    let dir = root.dir();
    let parents = Parents::ensure(&dir, key).map_err(io)?;
    if !replace && parents.holds().map_err(io)? {
        parents.sync().map_err(io)?;
        return Ok(Put::Existed);
    }
    let mut temp = Temp::create(&dir).map_err(io)?;
    temp.fill(key, body, given_up)?;
    if given_up.load(Ordering::Relaxed) {
        return Err(StoreError::Stopped { op: "put", key: key.to_string() });
    }
    let put = if replace {
        rustix::fs::renameat(&temp.dir, &temp.name, parents.last(), parents.name).map_err(io)?;
        temp.gone = true;
        Put::Created
    } else {
        temp.publish(key, &parents)?
    };
    // Also where it existed: whoever linked it may not have come this far yet, and callers rely on what we say.
    parents.sync().map_err(io)?;
    Ok(put)
}

/// Does everything a put does but for an object that nobody sees, and takes it away again.
pub(super) fn rehearse(root: &Root) -> Result<(), StoreError> {
    let io = |errno: Errno| failed("check", TEMP_DIR, errno);
    let dir = root.dir();
    let mut temp = Temp::create(&dir).map_err(io)?;
    rustix::fs::fsync(&temp.file).map_err(io)?;
    let second = format!("{}-link", temp.name);
    let linked = appear(&mut temp, "check", TEMP_DIR, None, &second);
    match rustix::fs::unlinkat(&temp.dir, &second, AtFlags::empty()) {
        Err(Errno::NOENT) | Ok(()) => linked.map(drop),
        Err(errno) => Err(io(errno)),
    }
}

/// The directories of an object, from the root down, held open.
struct Parents<'a> {
    dirs: Vec<OwnedFd>,
    name: &'a str,
}

impl<'a> Parents<'a> {
    /// Opens them, and makes what is missing.
    fn ensure(root: &OwnedFd, key: &'a Key) -> rustix::io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let mut dirs = vec![open_beneath(root.as_fd(), ".", flags)?];
        let mut segments = key.segments().peekable();
        while let Some(segment) = segments.next() {
            if segments.peek().is_none() {
                return Ok(Self { dirs, name: segment });
            }
            let above = dirs[dirs.len() - 1].as_fd();
            let dir = match open_beneath(above, segment, flags) {
                Err(Errno::NOENT) => {
                    make_dir(above, segment)?;
                    open_beneath(above, segment, flags)?
                }
                dir => dir?,
            };
            dirs.push(dir);
        }
        Err(Errno::INVAL)
    }

    fn last(&self) -> BorrowedFd<'_> {
        self.dirs[self.dirs.len() - 1].as_fd()
    }

    /// Whether the object is there.
    fn holds(&self) -> rustix::io::Result<bool> {
        match rustix::fs::statat(self.last(), self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(false),
            stat => match FileType::from_raw_mode(stat?.st_mode) {
                FileType::RegularFile => Ok(true),
                _ => Err(Errno::ISDIR),
            },
        }
    }

    /// Makes the object's name and the directories above durable. Those that are clean cost next to nothing.
    fn sync(&self) -> rustix::io::Result<()> {
        for dir in self.dirs.iter().rev() {
            match rustix::fs::fsync(dir) {
                // Some file systems of FUSE cannot sync a directory: their server holds it.
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
                done => done?,
            }
        }
        Ok(())
    }
}

fn make_dir(above: BorrowedFd<'_>, name: &str) -> rustix::io::Result<()> {
    match rustix::fs::mkdirat(above, name, Mode::from_raw_mode(0o755)) {
        Err(Errno::EXIST) => Ok(()),
        done => done,
    }
}

/// A file that nobody sees yet. Dropped, it is removed; after a crash, the sweep removes it.
struct Temp {
    dir: OwnedFd,
    name: String,
    file: File,
    gone: bool,
}

impl Temp {
    fn create(root: &OwnedFd) -> rustix::io::Result<Self> {
        make_dir(root.as_fd(), TEMP_DIR)?;
        let dir = open_beneath(root.as_fd(), TEMP_DIR, OFlags::RDONLY | OFlags::DIRECTORY)?;
        // Writers of all nodes share this directory.
        let mut rng = Rng::fresh();
        let name = format!("{:016x}{:016x}", rng.next(), rng.next());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(&dir, &name, flags, Mode::from_raw_mode(0o644))?;
        Ok(Self { dir, name, file: File::from(file), gone: false })
    }

    /// Writes and syncs the bytes.
    fn fill(&mut self, key: &Key, body: &Body, given_up: &AtomicBool) -> Result<(), StoreError> {
        let io = |e: io::Error| StoreError::io("put", key.as_str(), e);
        match body {
            Body::Bytes(bytes) => self.file.write_all(bytes).map_err(io)?,
            Body::File(path) => self.copy(key, path, given_up)?,
        }
        self.file.sync_all().map_err(io)
    }

    fn copy(&mut self, key: &Key, path: &Path, given_up: &AtomicBool) -> Result<(), StoreError> {
        let (from, size) = source::open(path)?;
        let mut done = 0;
        while done < size {
            if given_up.load(Ordering::Relaxed) {
                return Err(StoreError::Stopped { op: "put", key: key.to_string() });
            }
            // io::copy leaves the bytes to the kernel where it can.
            let piece = io::copy(&mut (&from).take(PIECE_BYTES), &mut self.file)
                .map_err(|e| StoreError::io("put", key.as_str(), e))?;
            if piece == 0 {
                break;
            }
            done += piece;
        }
        let changed = || source::fault(path, io::Error::other("its size changed while it was read"));
        if done == size { Ok(()) } else { Err(changed()) }
    }

    fn publish(&mut self, key: &Key, parents: &Parents<'_>) -> Result<Put, StoreError> {
        appear(self, "put", key.as_str(), Some(parents.last()), parents.name)
    }
}

/// Gives the file a second name in a directory (or its own), unless the name is taken.
fn appear(
    temp: &mut Temp,
    op: &'static str,
    key: &str,
    dir: Option<BorrowedFd<'_>>,
    name: &str,
) -> Result<Put, StoreError> {
    let to = dir.unwrap_or(temp.dir.as_fd());
    match rustix::fs::linkat(&temp.dir, &temp.name, to, name, AtFlags::empty()) {
        Ok(()) => Ok(Put::Created),
        // NFS may repeat a request whose answer was lost, and answer that the name is taken: by us.
        Err(Errno::EXIST) => {
            let links = rustix::fs::fstat(&temp.file).map_or(1, |stat| stat.st_nlink);
            Ok(if links > 1 { Put::Created } else { Put::Existed })
        }
        // No hard links here.
        Err(Errno::PERM | Errno::NOSYS | Errno::OPNOTSUPP | Errno::MLINK) => {
            let renamed = rename_unless_taken(temp, to, name);
            temp.gone = matches!(renamed, Ok(Put::Created));
            renamed.map_err(|errno| match errno {
                Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP => StoreError::Unsupported {
                    what: "its file system has neither hard links nor renames that replace nothing".into(),
                },
                errno => failed(op, key, errno),
            })
        }
        Err(errno) => Err(failed(op, key, errno)),
    }
}

/// The error of a put. That something is not there is no answer to it: a directory or the temporary file was taken away
/// (by a sweep, after a writer slept for long), and another try makes them again.
fn failed(op: &'static str, key: &str, errno: Errno) -> StoreError {
    if errno == Errno::NOENT {
        let source = io::Error::other("what was being put was taken away");
        return StoreError::Io { op, key: key.to_owned(), source };
    }
    StoreError::io(op, key, errno)
}

/// Moves the file to its name, unless that is taken.
fn rename_unless_taken(temp: &Temp, to: BorrowedFd<'_>, name: &str) -> rustix::io::Result<Put> {
    match rustix::fs::renameat_with(&temp.dir, &temp.name, to, name, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(Put::Created),
        Err(Errno::EXIST) => Ok(Put::Existed),
        Err(errno) => Err(errno),
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        if !self.gone
            && let Err(errno) = rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty())
        {
            tracing::debug!(name = self.name, %errno, "a temporary file stays until the sweep");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renames_where_there_are_no_links() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = Root::open(dir.path()).expect("a store");
        let put = |text: &[u8]| {
            let mut temp = Temp::create(&root.dir()).expect("a file");
            temp.file.write_all(text).expect("a write");
            let put = rename_unless_taken(&temp, root.dir().as_fd(), "object").expect("a rename");
            temp.gone = put == Put::Created;
            put
        };
        assert_eq!((put(b"first"), put(b"second")), (Put::Created, Put::Existed));
        assert_eq!(std::fs::read(dir.path().join("object")).expect("a file"), b"first");
        assert_eq!(std::fs::read_dir(dir.path().join(TEMP_DIR)).expect("a directory").count(), 0);
    }

    #[test]
    fn a_put_that_was_swept_may_be_tried_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let root = Root::open(dir.path()).expect("a store");
        let mut temp = Temp::create(&root.dir()).expect("a file");
        assert_eq!(crate::posix::sweep::sweep(&root, std::time::Duration::ZERO).expect("a sweep"), 1);
        let error =
            appear(&mut temp, "put", "object", Some(root.dir().as_fd()), "object").expect_err("nothing to link");
        assert!(error.is_retryable(), "{error}");
    }
}
