//! The data of a layer as it grows: each chunk once.

use corral_format::manifest::Hash;
use corral_format::{BLOCK, CHUNK, erofs};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::mpsc::SyncSender;

/// Where chunks go.
pub(super) struct Content<'a> {
    out: BufWriter<&'a File>,
    chunks: Vec<(u32, Hash)>,
    known: HashMap<(u32, Hash), u32>,
    next_block: u32,
    buffer: Vec<u8>,
    /// Told whenever much was written since it was told last.
    enough: SyncSender<()>,
    told_at: u32,
}

/// So many blocks are much.
const MUCH: u32 = (8 << 20) / BLOCK as u32;

impl<'a> Content<'a> {
    pub(super) fn new(out: &'a File, enough: SyncSender<()>) -> Self {
        const WRITE: usize = 1 << 20;
        let buffer = vec![0; CHUNK as usize];
        let out = BufWriter::with_capacity(WRITE, out);
        Self { out, chunks: Vec::new(), known: HashMap::new(), next_block: 0, buffer, enough, told_at: 0 }
    }

    /// Takes a file's content in; the block of each of its chunks. The file must have `size` bytes.
    pub(super) fn add(&mut self, file: &File, size: u64) -> io::Result<Vec<u32>> {
        const SECTOR: u64 = 512;
        let sparse = file.metadata()?.blocks() * SECTOR < size;
        let mut blocks = Vec::with_capacity(size.div_ceil(CHUNK) as usize);
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut at = 0;
        // Where the next bytes that are no hole begin.
        let mut data_at = 0;
        while at < size {
            let len = (size - at).min(CHUNK);
            if sparse && data_at < at + len {
                data_at = data_from(file, at)?.unwrap_or(size);
            }
            if sparse && data_at >= at + len {
                blocks.push(erofs::HOLE);
            } else {
                let piece = &mut buffer[..len as usize];
                file.read_exact_at(piece, at)?;
                blocks.push(self.chunk(piece)?);
            }
            at += len;
        }
        self.buffer = buffer;
        Ok(blocks)
    }

    fn chunk(&mut self, piece: &[u8]) -> io::Result<u32> {
        if piece.iter().all(|b| *b == 0) {
            return Ok(erofs::HOLE);
        }
        let key = (piece.len() as u32, *blake3::hash(piece).as_bytes());
        if let Some(block) = self.known.get(&key) {
            return Ok(*block);
        }
        let block = self.next_block;
        let padded = (piece.len() as u64).next_multiple_of(BLOCK);
        self.out.write_all(piece)?;
        self.out.write_all(&[0; BLOCK as usize][..padded as usize - piece.len()])?;
        let too_large = || io::Error::new(io::ErrorKind::FileTooLarge, "a layer's data has at most 16 TiB");
        self.next_block = block.checked_add((padded / BLOCK) as u32).ok_or_else(too_large)?;
        // One that is busy hears of it with a later chunk.
        if self.next_block - self.told_at >= MUCH && self.enough.try_send(()).is_ok() {
            self.told_at = self.next_block;
        }
        self.chunks.push(key);
        self.known.insert(key, block);
        Ok(block)
    }

    /// All chunks in order, once they are written.
    pub(super) fn finish(mut self) -> io::Result<Vec<(u32, Hash)>> {
        self.out.flush()?;
        Ok(self.chunks)
    }
}

/// The next byte that is not in a hole.
fn data_from(file: &File, at: u64) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        Ok(found) => Ok(Some(found)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}
