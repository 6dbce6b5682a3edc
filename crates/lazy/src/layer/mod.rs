//! One layer on this node: its files, and what is known of its chunks.
//!
//! [`map`] says which chunks are here, [`flights`] which are being brought, [`ahead`] what will be read next,
//! [`touched`] what was read first, [`evict`] drops its data, [`table`] finds layers by name and number.

pub(crate) mod ahead;
mod evict;
pub(crate) mod flights;
pub(crate) mod map;
pub(crate) mod table;
pub(crate) mod touched;

use crate::LayerId;
use crate::server::stats::{LayerStats, Tally};
use ahead::Streams;
use corral_format::BLOCK;
use corral_format::manifest::{Chunk, Manifest};
use corral_format::places::Places;
use flights::Flights;
use map::{Map, State};
use rustix::fs::{AtFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use touched::{Recorders, Touched};

/// Why a layer cannot be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LayerError {
    /// There is no such layer here.
    #[error("layer {0} is not on this node")]
    Unknown(LayerId),
    /// Its manifest is not what its name says.
    #[error("layer {id}: its manifest is damaged: {why}")]
    Manifest { id: LayerId, why: String },
    /// Another layer has its number.
    #[error("layer {id} has the number of layer {other}")]
    Number { id: LayerId, other: LayerId },
    /// One of its files cannot be used.
    #[error("layer {id}: {what}")]
    Io { id: LayerId, what: &'static str, source: io::Error },
}

/// A layer.
#[derive(Debug)]
pub(crate) struct Layer {
    pub id: LayerId,
    pub manifest: Manifest,
    pub map: Map,
    pub flights: Flights,
    pub streams: Mutex<Streams>,
    pub recorders: Recorders,
    pub touched: Touched,
    pub stats: LayerStats,
    /// Where chunks lie, once it was looked up.
    pub places: tokio::sync::Mutex<Option<Arc<Places>>>,
    /// Opens that were not released, as far as this process saw them.
    pub opens: AtomicUsize,
    /// To be dropped when nobody has it open.
    pub forgotten: AtomicBool,
    /// Set when the last step of a layer's life here begins: all is forced to the disk.
    pub finishing: AtomicBool,
    /// Whether it was looked at once whether all is here: the process before may have ended before the last step.
    pub seen_full: AtomicBool,
    dir: OwnedFd,
    identity: (u64, u64),
    /// Shared by whoever reads or writes data and believes or changes the map for it; alone, where both are dropped.
    data: RwLock<File>,
}

impl Layer {
    /// Reads what lies in `layers/HEX`. What is read of it is counted with that of all.
    pub fn load(layers: &Path, id: LayerId, boot_id: &str, all: &Arc<Tally>) -> Result<Self, LayerError> {
        let io = |what| move |e: Errno| LayerError::Io { id, what, source: e.into() };
        let dir = open_dir(layers, id)?;
        let identity = identity_of(&dir).map_err(io("its directory"))?;
        let bytes = read_file(&dir, "manifest", u64::MAX).map_err(io("its manifest"))?;
        let damaged = |why: String| LayerError::Manifest { id, why };
        let manifest = Manifest::decode(&bytes).map_err(|e| damaged(e.to_string()))?;
        if manifest.digest().hex() != id.hex() {
            return Err(damaged("it has another digest".to_owned()));
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let data = rustix::fs::openat(&dir, "data", flags, Mode::from_raw_mode(0o600)).map_err(io("its data"))?;
        let data = File::from(data);
        let there = data.metadata().map_err(|source| LayerError::Io { id, what: "its data", source })?.len();
        let whole = there >= manifest.data_len && !has_holes(&data, manifest.data_len);
        let reached = manifest.chunks.partition_point(|c| c.offset + u64::from(c.len) <= there);
        let map = Map::open(&dir, manifest.chunks.len(), boot_id, whole, reached).map_err(io("its presence map"))?;
        if there < manifest.data_len {
            data.set_len(manifest.data_len).map_err(|source| LayerError::Io { id, what: "its data", source })?;
        }
        Ok(Self {
            id,
            map,
            flights: Flights::default(),
            streams: Mutex::default(),
            recorders: Recorders::default(),
            touched: Touched::new(manifest.chunks.len()),
            stats: LayerStats::within(all),
            places: tokio::sync::Mutex::new(None),
            opens: AtomicUsize::new(0),
            forgotten: AtomicBool::new(false),
            finishing: AtomicBool::new(false),
            seen_full: AtomicBool::new(false),
            manifest,
            dir,
            identity,
            data: RwLock::new(data),
        })
    }

    /// Whether this is what lies at the layer's name now.
    pub fn is_current(&self, layers: &Path) -> Result<bool, LayerError> {
        let io = |e: Errno| LayerError::Io { id: self.id, what: "its directory", source: e.into() };
        Ok(identity_of(&open_dir(layers, self.id)?).map_err(io)? == self.identity)
    }

    pub fn chunk(&self, number: usize) -> &Chunk {
        &self.manifest.chunks[number]
    }

    /// Numbers of the chunks that a read touches.
    pub fn chunks_of(&self, offset: u64, length: usize) -> Range<usize> {
        self.manifest.chunks_of(offset, offset + length as u64)
    }

    /// Reads bytes of the data, where the chunks that they lie in are here; says whether they are.
    pub fn read(&self, chunks: Range<usize>, buffer: &mut [u8], offset: u64) -> io::Result<bool> {
        let data = self.data();
        let here = self.map.all_present(chunks);
        if here {
            data.read_exact_at(buffer, offset)?;
        }
        Ok(here)
    }

    /// Looks whether a chunk that may be here is what the manifest says, padding included, and notes that.
    pub fn look_at(&self, number: usize, buffer: &mut Vec<u8>) -> bool {
        let data = self.data();
        let chunk = self.chunk(number);
        buffer.resize(padded(chunk), 0);
        // Also where it has become present since somebody looked.
        let may_be = self.map.state(number) != State::Absent;
        let is_here = may_be && data.read_exact_at(buffer, chunk.offset).is_ok() && is_chunk(chunk, buffer);
        if is_here {
            self.map.set_present(number)
        } else {
            self.map.set_absent(number)
        }
        is_here
    }

    /// Writes a chunk that was checked, with its padding, and then says that it is here.
    pub fn write(&self, number: usize, bytes: &mut Vec<u8>) -> io::Result<()> {
        let chunk = self.chunk(number);
        bytes.resize(padded(chunk), 0);
        let data = self.data();
        data.write_all_at(bytes, chunk.offset)?;
        self.map.set_present(number);
        Ok(())
    }

    /// The table of places that lies here, if a sound one does.
    pub fn local_places(&self) -> Option<Places> {
        let chunks = self.manifest.chunks.len();
        // At worst every chunk lies in a pack of its own.
        let bytes = read_file(&self.dir, "places", 20 + chunks as u64 * (32 + 16)).ok()?;
        Places::decode(&bytes).ok().filter(|places| places.chunks.len() == chunks)
    }

    /// Forces everything to the disk and removes the map, which says that all is here; says whether it is. Nothing may be
    /// under way.
    pub fn finish(&self) -> io::Result<bool> {
        let data = self.data();
        // Dropped since it was asked for.
        if !self.map.is_full() {
            return Ok(false);
        }
        if let Err(error) = data.sync_data() {
            // What of it the disk lacks is not known: pages that failed are dropped without another word.
            self.map.doubt_all();
            return Err(error);
        }
        self.map.remove(&self.dir)?;
        rustix::fs::fsync(&self.dir)?;
        Ok(true)
    }

    fn data(&self) -> RwLockReadGuard<'_, File> {
        self.data.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn streams(&self) -> std::sync::MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn padded(chunk: &Chunk) -> usize {
    u64::from(chunk.len).next_multiple_of(BLOCK) as usize
}

/// Whether bytes are a chunk; what is beyond its length must be zero.
fn is_chunk(chunk: &Chunk, bytes: &[u8]) -> bool {
    let Some((content, padding)) = bytes.split_at_checked(chunk.len as usize) else { return false };
    *blake3::hash(content).as_bytes() == chunk.hash && padding.iter().all(|b| *b == 0)
}

fn open_dir(layers: &Path, id: LayerId) -> Result<OwnedFd, LayerError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::open(layers.join(id.hex()), flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT => LayerError::Unknown(id),
        errno => LayerError::Io { id, what: "its directory", source: errno.into() },
    })
}

fn identity_of(dir: &OwnedFd) -> Result<(u64, u64), Errno> {
    let stat = rustix::fs::statat(dir, "", AtFlags::EMPTY_PATH)?;
    Ok((stat.st_dev, stat.st_ino))
}

fn has_holes(file: &File, length: u64) -> bool {
    length > 0 && rustix::fs::seek(file, SeekFrom::Hole(0)).is_ok_and(|at| at < length)
}

/// A file of a layer's directory, of at most so many bytes.
pub(crate) fn read_file(dir: &OwnedFd, name: &str, most: u64) -> Result<Vec<u8>, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::openat(dir, name, flags, Mode::empty())?);
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    Ok(bytes)
}
