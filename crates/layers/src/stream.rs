//! Byte streams: hashing, counting, bounding and decompressing while reading.

use crate::config::CancelFlag;
use crate::error::ImportError;
use corral_api::digest::Digest;
use sha2::{Digest as _, Sha256};
use std::cell::RefCell;
use std::io::{self, BufReader, Read};
use std::rc::Rc;

/// Why a wrapped reader stopped; carried through `io::Error` and taken out again by [`classify`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamFault {
    #[error("cancelled")]
    Cancelled,
    #[error("more than {limit} bytes")]
    TooLarge { limit: u64 },
    #[error("longer than {expected} bytes")]
    TooLong { expected: u64 },
}

/// Turns an error of a stack of readers into the import's error.
pub(crate) fn classify(e: io::Error, source_name: &str) -> ImportError {
    let source_name = source_name.to_owned();
    if let Some(fault) = e.get_ref().and_then(|inner| inner.downcast_ref::<StreamFault>()) {
        return match fault {
            StreamFault::Cancelled => ImportError::Cancelled,
            StreamFault::TooLarge { limit } => ImportError::TooLarge { source_name, limit: *limit },
            StreamFault::TooLong { expected } => {
                ImportError::SizeMismatch { source_name, expected: *expected, actual: expected + 1 }
            }
        };
    }
    match e.kind() {
        io::ErrorKind::UnexpectedEof => ImportError::Truncated { source_name },
        io::ErrorKind::IsADirectory => ImportError::InvalidRequest(format!("{source_name}: {}", e.kind())),
        // flate2 answers InvalidInput and InvalidData, zstd Other for bytes that do not decode.
        _ if e.raw_os_error().is_none() => ImportError::Corrupt { source_name, reason: e.to_string() },
        _ => ImportError::io("read", source_name, e),
    }
}

/// What a [`Meter`] has seen so far.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) bytes: u64,
    hasher: Sha256,
}

impl Seen {
    pub(crate) fn digest(&self) -> Digest {
        Digest::from_bytes(self.hasher.clone().finalize().into())
    }
}

/// Makes the fault of a bound that was passed.
type MakeFault = fn(u64) -> StreamFault;

/// Hashes and counts what passes; stops at a bound and when cancelled.
pub(crate) struct Meter<'a, R> {
    inner: R,
    seen: Rc<RefCell<Seen>>,
    bound: Option<(u64, MakeFault)>,
    cancel: &'a CancelFlag,
    on_bytes: Option<Box<dyn FnMut(u64) + 'a>>,
}

impl<'a, R: Read> Meter<'a, R> {
    pub(crate) fn new(inner: R, cancel: &'a CancelFlag) -> (Self, Rc<RefCell<Seen>>) {
        let seen = Rc::new(RefCell::new(Seen::default()));
        (Self { inner, seen: Rc::clone(&seen), bound: None, cancel, on_bytes: None }, seen)
    }

    /// Fails once more than `bytes` have passed.
    pub(crate) fn bounded(mut self, bytes: u64, fault: MakeFault) -> Self {
        self.bound = Some((bytes, fault));
        self
    }

    /// Calls back with the running total.
    pub(crate) fn watched(mut self, on_bytes: impl FnMut(u64) + 'a) -> Self {
        self.on_bytes = Some(Box::new(on_bytes));
        self
    }
}

impl<R: Read> Read for Meter<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.cancel.is_cancelled() {
            return Err(io::Error::other(StreamFault::Cancelled));
        }
        let n = self.inner.read(buf)?;
        let mut seen = self.seen.borrow_mut();
        seen.bytes += n as u64;
        seen.hasher.update(&buf[..n]);
        if let Some((bound, fault)) = self.bound
            && seen.bytes > bound
        {
            return Err(io::Error::other(fault(bound)));
        }
        if let Some(f) = &mut self.on_bytes {
            f(seen.bytes);
        }
        Ok(n)
    }
}

/// How a stream is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codec {
    Plain,
    Gzip,
    Zstd,
}

impl Codec {
    /// Recognises a stream by its first bytes.
    pub(crate) fn sniff(head: &[u8]) -> Self {
        match head {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            _ => Self::Plain,
        }
    }
}

/// Puts a decoder before a reader; with no codec given it is recognised from the stream.
///
/// # Errors
/// The stream cannot be read or the decoder not be made.
pub(crate) fn decode<'a>(mut inner: impl Read + 'a, codec: Option<Codec>) -> io::Result<Box<dyn Read + 'a>> {
    let mut head = Vec::new();
    inner.by_ref().take(4).read_to_end(&mut head)?;
    let codec = codec.unwrap_or_else(|| Codec::sniff(&head));
    let whole = BufReader::with_capacity(256 << 10, io::Cursor::new(head).chain(inner));
    Ok(match codec {
        Codec::Plain => Box::new(whole),
        Codec::Gzip => Box::new(BufReader::with_capacity(256 << 10, flate2::bufread::MultiGzDecoder::new(whole))),
        Codec::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(whole)?;
            // The OCI specification allows windows up to 8 MiB; 128 MiB is what `zstd` itself decodes by default.
            decoder.window_log_max(27)?;
            Box::new(BufReader::with_capacity(256 << 10, decoder))
        }
    })
}
