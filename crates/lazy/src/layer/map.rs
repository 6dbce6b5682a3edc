//! Which chunks of a layer are here: the file `present`, and the same in memory.
//!
//! A byte of the file is set after the chunk was written, and all are unset and forced to the disk before data is
//! dropped, so the file is never ahead of the data when this process dies. When the host died, it
//! says only what is worth a look: such chunks are in doubt until they were compared with the manifest. So are all
//! when the map is unreadable, or missing although the data has holes.

use corral_format::presence::{self, HEADER, PRESENT, UNCHECKED};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

const ABSENT: u8 = 0;
const NAME: &str = "present";
const NEW: &str = "present.new";

/// The map of one layer.
#[derive(Debug)]
pub(crate) struct Map {
    /// None when all chunks are here for good, or the file cannot be written.
    file: Mutex<Option<File>>,
    states: Box<[AtomicU8]>,
    present: AtomicUsize,
    /// Whether the file is gone for good.
    complete: AtomicBool,
}

/// What is known of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// It is not here.
    Absent,
    /// It is here.
    Present,
    /// It may be here.
    InDoubt,
}

impl Map {
    /// Reads the map of a layer of so many chunks, of which the data reaches to the end of the first `reached`. `whole`
    /// says that the data is as long as it should be and has no holes.
    pub fn open(dir: &OwnedFd, chunks: usize, boot_id: &str, whole: bool, reached: usize) -> Result<Self, Errno> {
        let (mut states, sound) = match super::read_file(dir, NAME, HEADER + chunks as u64) {
            Err(Errno::NOENT) if whole || chunks == 0 => return Ok(Self::new(vec![PRESENT; chunks], None, true)),
            Err(Errno::NOENT) => (vec![UNCHECKED; chunks], false),
            Err(other) => return Err(other),
            Ok(bytes) => read(&bytes, chunks, boot_id),
        };
        // Written down before the data is made longer: zeroes would be taken for chunks later.
        let cut = states[reached..].iter().any(|s| *s != ABSENT);
        states[reached..].fill(ABSENT);
        let file = if sound && !cut { open_file(dir, NAME, OFlags::empty())? } else { rewrite(dir, boot_id, &states)? };
        Ok(Self::new(states, file, false))
    }

    fn new(states: Vec<u8>, file: Option<File>, complete: bool) -> Self {
        let present = states.iter().filter(|s| **s == PRESENT).count();
        Self {
            file: Mutex::new(file),
            states: states.into_iter().map(AtomicU8::new).collect(),
            present: AtomicUsize::new(present),
            complete: AtomicBool::new(complete),
        }
    }

    pub fn state(&self, chunk: usize) -> State {
        match self.states[chunk].load(Ordering::Acquire) {
            PRESENT => State::Present,
            UNCHECKED => State::InDoubt,
            _ => State::Absent,
        }
    }

    pub fn all_present(&self, chunks: Range<usize>) -> bool {
        self.states[chunks].iter().all(|s| s.load(Ordering::Acquire) == PRESENT)
    }

    /// How many chunks are here.
    pub fn present(&self) -> usize {
        self.present.load(Ordering::Acquire)
    }

    /// Whether all chunks are here.
    pub fn is_full(&self) -> bool {
        self.present() == self.states.len()
    }

    /// Whether all chunks are here and were forced to the disk.
    pub fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Acquire)
    }

    pub fn set_present(&self, chunk: usize) {
        self.set(chunk, PRESENT);
    }

    pub fn set_absent(&self, chunk: usize) {
        self.set(chunk, ABSENT);
    }

    /// What was believed of these chunks is so no more: they are looked at before they are used again.
    pub fn doubt(&self, chunks: Range<usize>) {
        self.complete.store(false, Ordering::Release);
        for chunk in chunks {
            if self.state(chunk) == State::Present {
                self.set(chunk, UNCHECKED);
            }
        }
    }

    pub fn doubt_all(&self) {
        self.doubt(0..self.states.len());
    }

    /// No chunk is here any more: known to the disk when this returns, also where all were here for good.
    pub fn clear(&self, dir: &OwnedFd, boot_id: &str) -> Result<(), Errno> {
        let mut file = self.file();
        let none = vec![ABSENT; self.states.len()];
        let new = write_new(dir, boot_id, &none)?.ok_or(Errno::NOSPC)?;
        rustix::fs::fsync(&new)?;
        rustix::fs::renameat(dir, NEW, dir, NAME)?;
        *file = Some(new);
        self.complete.store(false, Ordering::Release);
        for state in &self.states {
            state.store(ABSENT, Ordering::Release);
        }
        self.present.store(0, Ordering::Release);
        rustix::fs::fsync(dir)
    }

    fn set(&self, chunk: usize, state: u8) {
        if let Some(file) = &*self.file()
            && let Err(error) = file.write_all_at(&[state], HEADER + chunk as u64)
        {
            // It is fetched again after a restart: no harm, but somebody should look at the disk.
            tracing::warn!(%error, "a presence map cannot be written");
        }
        let before = self.states[chunk].swap(state, Ordering::AcqRel);
        match (before == PRESENT, state == PRESENT) {
            (false, true) => self.present.fetch_add(1, Ordering::AcqRel),
            (true, false) => self.present.fetch_sub(1, Ordering::AcqRel),
            _ => 0,
        };
    }

    /// Removes the file: all chunks are here, and on the disk.
    pub fn remove(&self, dir: &OwnedFd) -> Result<(), Errno> {
        let mut file = self.file();
        match rustix::fs::unlinkat(dir, NAME, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(other) => return Err(other),
        }
        *file = None;
        self.complete.store(true, Ordering::Release);
        Ok(())
    }

    fn file(&self) -> MutexGuard<'_, Option<File>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a map's bytes say of each chunk, and whether the file can be written on.
fn read(bytes: &[u8], chunks: usize, boot_id: &str) -> (Vec<u8>, bool) {
    let Ok(map) = presence::decode(bytes, chunks, boot_id) else { return (vec![UNCHECKED; chunks], false) };
    let marks = bytes[HEADER as usize..].iter().copied().chain(std::iter::repeat(ABSENT));
    let state = |(here, mark): (bool, u8)| match mark {
        _ if here && map.trusted => PRESENT,
        _ if here => UNCHECKED,
        UNCHECKED => UNCHECKED,
        _ => ABSENT,
    };
    (map.chunks.iter().copied().zip(marks).map(state).collect(), map.trusted)
}

fn open_file(dir: &OwnedFd, name: &str, more: OFlags) -> Result<Option<File>, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | more;
    Ok(Some(File::from(rustix::fs::openat(dir, name, flags, Mode::from_raw_mode(0o600))?)))
}

/// Puts a new map in the place of the old one. Where there is no room for it, the old one stays, which nobody believes,
/// and what is learned is not kept.
fn rewrite(dir: &OwnedFd, boot_id: &str, states: &[u8]) -> Result<Option<File>, Errno> {
    let file = write_new(dir, boot_id, states)?;
    if file.is_some() {
        rustix::fs::renameat(dir, NEW, dir, NAME)?;
    }
    Ok(file)
}

/// Writes a map beside the one that is there; none where there is no room.
fn write_new(dir: &OwnedFd, boot_id: &str, states: &[u8]) -> Result<Option<File>, Errno> {
    let file = match open_file(dir, NEW, OFlags::CREATE | OFlags::TRUNC) {
        Err(Errno::NOSPC | Errno::DQUOT | Errno::ROFS) => return Ok(None),
        file => file?,
    };
    let bytes = [presence::header(boot_id).as_slice(), states].concat();
    if let Some(file) = &file
        && let Err(error) = file.write_all_at(&bytes, 0)
    {
        tracing::warn!(%error, "a presence map cannot be written");
        return Ok(None);
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn states(bytes: Option<&[u8]>, boot: &str, whole: bool, reached: usize) -> (Vec<State>, bool) {
        let temp = tempfile::tempdir().unwrap();
        if let Some(bytes) = bytes {
            std::fs::write(temp.path().join(NAME), bytes).unwrap();
        }
        let dir = OwnedFd::from(File::open(temp.path()).unwrap());
        let map = Map::open(&dir, 4, boot, whole, reached).unwrap();
        let seen = (0..4).map(|n| map.state(n)).collect();
        // What a next process under the same boot would make of it is the same.
        let again = Map::open(&dir, 4, boot, whole, 4).unwrap();
        assert!((0..4).all(|n| again.state(n) == map.state(n)));
        (seen, map.is_complete())
    }

    #[test]
    fn what_is_not_of_this_boot_is_in_doubt() {
        use State::{Absent, InDoubt, Present};
        let mut bytes = presence::header("a").to_vec();
        bytes.extend([PRESENT, ABSENT, 7]);
        assert_eq!(states(Some(&bytes), "a", false, 4), (vec![Present, Absent, Absent, Absent], false));
        assert_eq!(states(Some(&bytes), "b", false, 4), (vec![InDoubt, Absent, Absent, Absent], false));
        assert_eq!(states(Some(&bytes), "a", false, 0), (vec![Absent; 4], false), "the data is too short");
        assert_eq!(states(Some(b"garbage"), "a", false, 4), (vec![InDoubt; 4], false));
        assert_eq!(states(Some(b""), "a", false, 3), (vec![InDoubt, InDoubt, InDoubt, Absent], false));
        assert_eq!(states(None, "a", true, 4), (vec![Present; 4], true));
        assert_eq!(states(None, "a", false, 4), (vec![InDoubt; 4], false), "holes");
    }
}
