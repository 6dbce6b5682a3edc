//! Reading a command's bounded log by stream offset, while it grows or afterwards.

use crate::RuntimeError;
use corral_keeper::log;
use corral_keeper::protocol::LogBounds;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A log open for reading.
#[derive(Debug)]
pub struct LogReader {
    file: File,
    path: PathBuf,
    bounds: LogBounds,
}

/// Bytes read from a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Stream offset of the first byte; beyond the one asked for when that one was dropped.
    pub offset: u64,
    /// The bytes; empty at the end of what was written so far.
    pub bytes: Vec<u8>,
}

impl LogReader {
    /// Opens a log.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(path: &Path, bounds: LogBounds) -> Result<Self, RuntimeError> {
        let file = File::open(path).map_err(|e| RuntimeError::host("open", path, e))?;
        Ok(Self { file, path: path.to_owned(), bounds })
    }

    /// Bytes written so far, by the file alone.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn total(&self) -> Result<u64, RuntimeError> {
        log::total_of(self.file.as_fd(), self.bounds).map_err(|e| RuntimeError::host("read", &self.path, e))
    }

    /// Reads at most `most` bytes from `offset`, given that `total` bytes were written.
    ///
    /// # Errors
    /// When the file cannot be read, or is shorter than it must be.
    pub fn read(&self, offset: u64, most: usize, total: u64) -> Result<Chunk, RuntimeError> {
        let (from, to) = log::dropped(self.bounds, total);
        let offset = if (from..to).contains(&offset) { to } else { offset };
        if offset >= total {
            return Ok(Chunk { offset, bytes: Vec::new() });
        }
        let (at, run) = log::place(self.bounds, offset);
        // A read may not cross the gap, the ring's seam or the end.
        let end = if offset < from { from.max(self.bounds.head_bytes.min(total)) } else { total };
        let n = (most as u64).min(run).min(end - offset) as usize;
        let mut bytes = vec![0; n];
        let got = read_at_most(&self.file, &mut bytes, at).map_err(|e| RuntimeError::host("read", &self.path, e))?;
        if got < n {
            // The host refused the rest: it is counted, and gone.
            bytes.truncate(got);
            return Ok(if got == 0 { Chunk { offset: total, bytes } } else { Chunk { offset, bytes } });
        }
        if offset >= self.bounds.head_bytes {
            // The ring may have gone round meanwhile: what was overwritten is not what was asked for.
            let (_, now_to) = log::dropped(self.bounds, self.total()?.max(total));
            if now_to > offset {
                let stale = ((now_to - offset) as usize).min(bytes.len());
                bytes.drain(..stale);
                return Ok(Chunk { offset: offset + stale as u64, bytes });
            }
        }
        Ok(Chunk { offset, bytes })
    }
}

/// Reads until the buffer is full or the file ends.
fn read_at_most(file: &File, buffer: &mut [u8], at: u64) -> std::io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match file.read_at(&mut buffer[got..], at + got as u64) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use super::*;
    use corral_keeper::output::Output;
    use std::io::Write;

    fn written(bounds: LogBounds, data: &[u8]) -> (tempfile::NamedTempFile, LogReader) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (r, mut w) = std::io::pipe().unwrap();
        w.write_all(data).unwrap();
        drop(w);
        let mut output = Output::new(r.into(), file.reopen().unwrap().into(), bounds, false);
        while output.drain() != corral_keeper::output::Turn::Closed {}
        let reader = LogReader::open(file.path(), bounds).unwrap();
        (file, reader)
    }

    fn all(reader: &LogReader, total: u64) -> (Vec<u8>, Vec<u64>) {
        let (mut at, mut got, mut jumps) = (0, Vec::new(), Vec::new());
        loop {
            let chunk = reader.read(at, 3, total).unwrap();
            if chunk.bytes.is_empty() {
                return (got, jumps);
            }
            if chunk.offset != at {
                jumps.push(chunk.offset);
            }
            at = chunk.offset + chunk.bytes.len() as u64;
            got.extend(chunk.bytes);
        }
    }

    #[test]
    fn what_the_host_refused_is_passed_over() {
        let bounds = LogBounds { head_bytes: 100, tail_bytes: 5 };
        let (file, reader) = written(bounds, &[7; 40]);
        file.as_file().set_len(16 + 25).unwrap();
        assert_eq!(reader.read(20, 64, 40).unwrap(), Chunk { offset: 20, bytes: vec![7; 5] });
        assert_eq!(reader.read(25, 64, 40).unwrap(), Chunk { offset: 40, bytes: vec![] });
    }

    #[test]
    fn whole_when_it_fits_head_and_tail_when_not() {
        let bounds = LogBounds { head_bytes: 8, tail_bytes: 5 };
        let data: Vec<u8> = (0..40).collect();
        for n in 0..40usize {
            let (_file, reader) = written(bounds, &data[..n]);
            assert_eq!(reader.total().unwrap(), n as u64);
            let (got, jumps) = all(&reader, n as u64);
            if n <= 13 {
                assert_eq!((got.as_slice(), jumps.len()), (&data[..n], 0), "{n}");
            } else {
                assert_eq!(got, [&data[..8], &data[n - 5..n]].concat(), "{n}");
                assert_eq!(jumps, [n as u64 - 5]);
            }
        }
    }
}
