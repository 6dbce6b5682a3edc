//! What node and worker say to each other over the worker's stream socket.
//!
//! ```text
//! frame = kind (1 byte) · length (4 bytes, little endian) · payload
//! node:   Request(Op) · then for writes Data… End
//! worker: Result(Outcome), before the data of a read and after the data of a write · Data… End
//! ```
//! The node treats every frame as hostile: lengths are bounded, anything unexpected ends the operation.

use corral_api::files::{FileStatus, FileType, WatchEvent};
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};

/// Longest payload of a frame.
pub const MAX_PAYLOAD: usize = 256 << 10;
/// Most entries of one list.
pub const MAX_ENTRIES: u32 = 10_000;

/// Kinds of frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// An operation.
    Request = b'Q',
    /// Bytes of a file or archive.
    Data = b'D',
    /// The bytes are complete.
    End = b'E',
    /// How it went.
    Result = b'R',
    /// A change seen by a watch.
    Watch = b'W',
    /// Entries of a list.
    Entries = b'L',
}

impl Kind {
    /// The kind of this byte.
    pub fn from_byte(byte: u8) -> Option<Self> {
        [Self::Request, Self::Data, Self::End, Self::Result, Self::Watch, Self::Entries]
            .into_iter()
            .find(|k| *k as u8 == byte)
    }
}

/// An operation. Paths are absolute in the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// Read a regular file: result with its status, then its bytes.
    Read {
        /// Which file.
        path: String,
        /// First byte.
        offset: u64,
        /// Most bytes; to the end when absent.
        limit: Option<u64>,
    },
    /// Replace or make a regular file atomically with the bytes that follow.
    Write {
        /// Which file.
        path: String,
        /// Permission bits; those of the file it replaces, or 0644, when absent.
        mode: Option<u32>,
        /// Make missing parent directories.
        parents: bool,
    },
    /// Attributes; a symbolic link itself.
    Stat {
        /// Of what.
        path: String,
    },
    /// A directory's entries.
    List {
        /// Which directory.
        path: String,
        /// 1 = its own entries.
        depth: u32,
        /// Most entries.
        limit: u32,
    },
    /// Make a directory.
    Mkdir {
        /// Which.
        path: String,
        /// Make missing parents and accept an existing directory.
        parents: bool,
        /// Permission bits.
        mode: u32,
    },
    /// Rename.
    Move {
        /// What.
        from: String,
        /// Where to.
        to: String,
        /// Replace what is there.
        overwrite: bool,
    },
    /// Remove.
    Remove {
        /// What.
        path: String,
        /// Directories with all they hold.
        recursive: bool,
    },
    /// A directory or file as a tar stream.
    TarOut {
        /// What.
        path: String,
    },
    /// Unpack the tar stream that follows into a directory, which is made when missing.
    TarIn {
        /// Which directory.
        path: String,
        /// Entries get the owners that the stream names, which only root may give.
        owners: bool,
    },
    /// Tell changes until the node closes the socket.
    Watch {
        /// Which directory.
        path: String,
        /// With all below it.
        recursive: bool,
    },
    /// The last bytes of a file.
    ReadEnd {
        /// Which file.
        path: String,
        /// How many; all of a shorter file.
        bytes: u64,
    },
}

/// Result of an operation.
pub type Outcome = Result<Option<WireStatus>, OpError>;

/// [`FileStatus`] in a form that postcard carries: it knows no skipped fields.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireStatus {
    path: String,
    file_type: FileType,
    size_bytes: u64,
    mode: u32,
    uid: u32,
    gid: u32,
    mtime_ms: i64,
    link_target: Option<String>,
    path_base64: Option<String>,
    link_target_base64: Option<String>,
}

impl From<FileStatus> for WireStatus {
    fn from(s: FileStatus) -> Self {
        let FileStatus { path, file_type, size_bytes, mode, uid, gid, mtime_ms, .. } = s;
        let FileStatus { link_target, path_base64, link_target_base64, .. } = s;
        Self { path, file_type, size_bytes, mode, uid, gid, mtime_ms, link_target, path_base64, link_target_base64 }
    }
}

impl From<WireStatus> for FileStatus {
    fn from(s: WireStatus) -> Self {
        let WireStatus { path, file_type, size_bytes, mode, uid, gid, mtime_ms, .. } = s;
        let WireStatus { link_target, path_base64, link_target_base64, .. } = s;
        Self { path, file_type, size_bytes, mode, uid, gid, mtime_ms, link_target, path_base64, link_target_base64 }
    }
}

/// Why an operation failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpError {
    /// Sort of failure.
    pub kind: OpErrorKind,
    /// For a person: the path and what was wrong with it.
    pub message: String,
}

/// Sorts of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpErrorKind {
    /// Nothing of that name.
    NotFound,
    /// Something is there already, or a directory is not empty.
    Exists,
    /// The user may not.
    Denied,
    /// A directory, or none, where the other is needed; a device, pipe or socket.
    WrongType,
    /// The disk quota is used up.
    DiskFull,
    /// The path cannot be used: too long, a loop of links, an odd name.
    BadPath,
    /// The archive cannot be unpacked.
    BadArchive,
    /// Somebody holds it for now.
    Busy,
    /// Memory, processes, descriptors or watches are used up.
    Limit,
    /// Another failure.
    Failed,
    /// The file system is full, not the disk quota.
    NoRoom,
}

/// A watch's event on the wire (postcard knows no tagged enums).
pub fn encode_watch(event: &WatchEvent) -> Vec<u8> {
    let (kind, path): (u8, &str) = match event {
        WatchEvent::Ready => (0, ""),
        WatchEvent::Created { path } => (1, path),
        WatchEvent::Modified { path } => (2, path),
        WatchEvent::Removed { path } => (3, path),
        WatchEvent::Attributes { path } => (4, path),
        WatchEvent::Overflow => (5, ""),
    };
    [&[kind], path.as_bytes()].concat()
}

/// The reverse of [`encode_watch`]; nothing for nonsense.
pub fn decode_watch(bytes: &[u8]) -> Option<WatchEvent> {
    let (kind, path) = bytes.split_first()?;
    let path = String::from_utf8_lossy(path).into_owned();
    Some(match kind {
        0 => WatchEvent::Ready,
        1 => WatchEvent::Created { path },
        2 => WatchEvent::Modified { path },
        3 => WatchEvent::Removed { path },
        4 => WatchEvent::Attributes { path },
        5 => WatchEvent::Overflow,
        _ => return None,
    })
}

/// Writes a frame.
///
/// # Errors
/// Those of the stream; a payload that is too long is an error too.
pub fn write_frame(out: &mut impl Write, kind: Kind, payload: &[u8]) -> io::Result<()> {
    if payload.len() > MAX_PAYLOAD {
        return Err(io::Error::other("frame too long"));
    }
    let mut header = [kind as u8, 0, 0, 0, 0];
    header[1..].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    out.write_all(&header)?;
    out.write_all(payload)
}

/// Reads a frame into `payload`; nothing at the end of the stream.
///
/// # Errors
/// Those of the stream, and frames that are cut, too long or of no known kind.
pub fn read_frame(input: &mut impl Read, payload: &mut Vec<u8>) -> io::Result<Option<Kind>> {
    let mut header = [0u8; 5];
    let mut have = 0;
    while have < header.len() {
        match input.read(&mut header[have..]) {
            Ok(0) if have == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => have += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let (kind, length) = parse_header(header)?;
    payload.resize(length, 0);
    input.read_exact(payload)?;
    Ok(Some(kind))
}

/// Kind and length of a frame.
///
/// # Errors
/// An unknown kind, or a length beyond the bound.
pub fn parse_header(header: [u8; 5]) -> io::Result<(Kind, usize)> {
    let length = u32::from_le_bytes([header[1], header[2], header[3], header[4]]) as usize;
    let kind = Kind::from_byte(header[0]).ok_or_else(|| io::Error::other("unknown kind of frame"))?;
    if length > MAX_PAYLOAD {
        return Err(io::Error::other("frame too long"));
    }
    Ok((kind, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_round_trip_and_nonsense_is_refused() {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, Kind::Data, b"abc").unwrap();
        let mut payload = Vec::new();
        let mut input = bytes.as_slice();
        assert_eq!(read_frame(&mut input, &mut payload).unwrap(), Some(Kind::Data));
        assert_eq!(payload, b"abc");
        assert_eq!(read_frame(&mut input, &mut payload).unwrap(), None);
        assert!(read_frame(&mut &bytes[..6], &mut payload).is_err(), "cut");
        assert!(read_frame(&mut &b"D\xff\xff\xff\xff"[..], &mut payload).is_err(), "too long");
        assert!(read_frame(&mut &b"?\0\0\0\0"[..], &mut payload).is_err(), "unknown");
    }

    #[test]
    fn watch_events_round_trip() {
        for event in [WatchEvent::Ready, WatchEvent::Overflow, WatchEvent::Created { path: "a/b".into() }] {
            assert_eq!(decode_watch(&encode_watch(&event)), Some(event));
        }
        assert_eq!(decode_watch(&[9]), None);
        assert_eq!(decode_watch(&[]), None);
    }
}
