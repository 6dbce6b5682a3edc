//! Changes below a directory, by inotify. Watches are charged to the sandbox's own allowance. Names that are not UTF-8
//! are told in readable form, and directories of such names are not watched below.

use crate::paths::{self, failed};
use crate::protocol::{Kind, OpError, encode_watch, write_frame};
use crate::walk::{Step, Walk};
use corral_api::files::WatchEvent;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::FileType;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

const WHAT: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::ONLYDIR);

struct Watcher {
    inotify: OwnedFd,
    top: String,
    recursive: bool,
    /// Directory of each watch, below the top; empty for the top itself.
    dirs: HashMap<i32, String>,
}

/// Tells changes until the socket is closed.
pub fn run(path: &str, recursive: bool, socket: &mut UnixStream) -> Result<(), OpError> {
    let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(|e| failed(path, e))?;
    let mut watcher = Watcher { inotify, top: path.trim_end_matches('/').to_owned(), recursive, dirs: HashMap::new() };
    paths::open_directory(path)?;
    watcher.add("")?;
    if recursive {
        for dir in watcher.subdirectories("")? {
            watcher.add(&dir)?;
        }
    }
    let told =
        |socket: &mut UnixStream, event: &WatchEvent| write_frame(socket, Kind::Watch, &encode_watch(event)).is_ok();
    if !told(socket, &WatchEvent::Ready) {
        return Ok(());
    }
    loop {
        {
            let mut fds = [PollFd::new(&watcher.inotify, PollFlags::IN), PollFd::new(socket, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(failed(path, e)),
            }
            if !fds[1].revents().is_empty() {
                return Ok(());
            }
        }
        for event in watcher.read()? {
            if !told(socket, &event) {
                return Ok(());
            }
        }
    }
}

impl Watcher {
    fn full(&self, relative: &str) -> String {
        if relative.is_empty() { format!("{}/", self.top) } else { format!("{}/{relative}", self.top) }
    }

    fn add(&mut self, relative: &str) -> Result<(), OpError> {
        let full = self.full(relative);
        match inotify::add_watch(
            &self.inotify,
            &full,
            WHAT | if relative.is_empty() { WatchFlags::empty() } else { WatchFlags::DONT_FOLLOW },
        ) {
            Ok(id) => {
                self.dirs.insert(id, relative.to_owned());
                Ok(())
            }
            // Gone already.
            Err(Errno::NOENT | Errno::NOTDIR) if !relative.is_empty() => Ok(()),
            Err(Errno::NOSPC) => Err(failed(&full, Errno::NFILE)),
            Err(other) => Err(failed(&full, other)),
        }
    }

    fn subdirectories(&self, relative: &str) -> Result<Vec<String>, OpError> {
        let full = self.full(relative);
        let Ok(dir) = paths::open_directory(&full) else { return Ok(Vec::new()) };
        let mut walk = Walk::new(dir, &full)?;
        let mut found = Vec::new();
        while let Some(step) = walk.next(usize::MAX)? {
            if let Step::Entry { relative: below, stat, .. } = step
                && FileType::from_raw_mode(stat.st_mode) == FileType::Directory
            {
                found.push(join(relative, &below.to_string_lossy()));
            }
        }
        Ok(found)
    }

    fn read(&mut self) -> Result<Vec<WatchEvent>, OpError> {
        let mut out = Vec::new();
        let mut fresh = Vec::new();
        {
            let mut space = [MaybeUninit::<u8>::uninit(); 16 << 10];
            let mut reader = Reader::new(self.inotify.as_fd(), &mut space);
            loop {
                let event = match reader.next() {
                    Ok(event) => event,
                    Err(Errno::AGAIN | Errno::INTR) => break,
                    Err(e) => return Err(failed(&self.top, e)),
                };
                let flags = event.events();
                if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                    out.push(WatchEvent::Overflow);
                    continue;
                }
                if flags.contains(ReadFlags::IGNORED) {
                    self.dirs.remove(&event.wd());
                    continue;
                }
                let (Some(dir), Some(name)) = (self.dirs.get(&event.wd()), event.file_name()) else { continue };
                let path = join(dir, &name.to_string_lossy());
                if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
                    if self.recursive && flags.contains(ReadFlags::ISDIR) {
                        fresh.push(path.clone());
                    }
                    out.push(WatchEvent::Created { path });
                } else if flags.intersects(ReadFlags::DELETE | ReadFlags::MOVED_FROM) {
                    out.push(WatchEvent::Removed { path });
                } else if flags.intersects(ReadFlags::MODIFY | ReadFlags::CLOSE_WRITE) {
                    let event = WatchEvent::Modified { path };
                    if out.last() != Some(&event) {
                        out.push(event);
                    }
                } else if flags.contains(ReadFlags::ATTRIB) {
                    out.push(WatchEvent::Attributes { path });
                }
            }
        }
        for dir in fresh {
            self.add(&dir)?;
            // What was put there before the watch was in place.
            let top = self.full(&dir);
            let Ok(open) = paths::open_directory(&top) else { continue };
            let mut walk = Walk::new(open, &top)?;
            let mut below = Vec::new();
            while let Some(step) = walk.next(usize::MAX)? {
                if let Step::Entry { relative, stat, .. } = step {
                    below.push((
                        join(&dir, &relative.to_string_lossy()),
                        FileType::from_raw_mode(stat.st_mode) == FileType::Directory,
                    ));
                }
            }
            for (path, is_dir) in below {
                if is_dir {
                    self.add(&path)?;
                }
                out.push(WatchEvent::Created { path });
            }
        }
        Ok(out)
    }
}

fn join(dir: &str, name: &str) -> String {
    if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") }
}
