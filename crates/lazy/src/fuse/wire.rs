//! Requests and answers as bytes, in the machine's order.

use rustix::io::Errno;

/// Bytes before a request's arguments.
pub const HEADER: usize = 40;
const OUT_HEADER: usize = 16;

/// Kinds of requests that are known here.
pub mod opcode {
    #![allow(missing_docs)]
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const SETXATTR: u32 = 21;
    pub const REMOVEXATTR: u32 = 24;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const RENAME2: u32 = 45;
}

/// One request.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Which kind.
    pub opcode: u32,
    /// What its answer is known by.
    pub unique: u64,
    /// The file it is about.
    pub node: u64,
    /// The thread that asks, or 0 where it is not of this process namespace.
    pub pid: u32,
    /// Its arguments.
    pub body: &'a [u8],
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

impl<'a> Request<'a> {
    /// What was received, or nothing where it is no request.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        Some(Self {
            opcode: u32_at(bytes, 4)?,
            unique: u64_at(bytes, 8)?,
            node: u64_at(bytes, 16)?,
            pid: u32_at(bytes, 32)?,
            body: bytes.get(HEADER..)?,
        })
    }

    /// The name that is looked up.
    pub fn name(&self) -> Option<&'a str> {
        let end = self.body.iter().position(|b| *b == 0)?;
        std::str::from_utf8(&self.body[..end]).ok()
    }

    /// Handle, offset and size of a read of a file or directory.
    pub fn read(&self) -> Option<(u64, u64, u32)> {
        Some((u64_at(self.body, 0)?, u64_at(self.body, 8)?, u32_at(self.body, 16)?))
    }

    /// Flags of an open.
    pub fn open_flags(&self) -> Option<u32> {
        u32_at(self.body, 0)
    }

    /// The request that is interrupted.
    pub fn interrupted(&self) -> Option<u64> {
        u64_at(self.body, 0)
    }

    /// The files that a batch forgets.
    pub fn forgotten(&self) -> impl Iterator<Item = u64> + '_ {
        let count = u32_at(self.body, 0).unwrap_or(0) as usize;
        (0..count).map_while(|n| u64_at(self.body, 8 + n * 16))
    }

    /// What the kernel offers in its first request.
    pub fn offer(&self) -> Option<Offer> {
        Some(Offer {
            major: u32_at(self.body, 0)?,
            minor: u32_at(self.body, 4)?,
            max_readahead: u32_at(self.body, 8)?,
            flags: u64::from(u32_at(self.body, 12)?) | u64::from(u32_at(self.body, 16).unwrap_or(0)) << 32,
        })
    }
}

/// What a side can do, as told at the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// Protocol, first part: 7.
    pub major: u32,
    /// Protocol, second part.
    pub minor: u32,
    /// Bytes read ahead at most.
    pub max_readahead: u32,
    /// `FUSE_*` flags, the second word above the first.
    pub flags: u64,
}

/// Reads may run at once.
pub const ASYNC_READ: u64 = 1;
/// Direct reads too.
pub const ASYNC_DIO: u64 = 1 << 15;
/// Lookups in one directory may run at once.
pub const PARALLEL_DIROPS: u64 = 1 << 18;
/// The number of pages of a read is agreed on.
pub const MAX_PAGES: u64 = 1 << 22;
/// There is a second word of flags.
pub const INIT_EXT: u64 = 1 << 30;
/// Requests that were handed out can be asked for again.
pub const HAS_RESEND: u64 = 1 << 39;

/// Bytes, put together.
#[derive(Debug, Default)]
pub struct Out(Vec<u8>);

impl Out {
    fn u16(mut self, value: u16) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn zeroes(mut self, count: usize) -> Self {
        self.0.resize(self.0.len() + count, 0);
        self
    }

    fn attributes(self, of: &Attributes) -> Self {
        let (mode, links) = if of.directory { (0o040_500, 2) } else { (0o100_400, 1) };
        let times = |out: Self| out.u64(0).u64(0).u64(0);
        times(self.u64(of.node).u64(of.size).u64(of.size.div_ceil(512)))
            .zeroes(12)
            .u32(mode)
            .u32(links)
            .zeroes(12)
            // Block size, and no flags.
            .u32(128 << 10)
            .u32(0)
    }
}

/// What is told of a file.
#[derive(Debug, Clone, Copy)]
pub struct Attributes {
    /// Its number.
    pub node: u64,
    /// Its bytes.
    pub size: u64,
    /// Whether it is the directory.
    pub directory: bool,
}

/// How long the kernel may keep attributes, in seconds: they never change.
const KEEP_SECONDS: u64 = 86_400;

/// Answer of a lookup. The name is not kept, so that a layer that went is gone at once.
pub fn entry(of: &Attributes) -> Vec<u8> {
    Out::default().u64(of.node).u64(0).u64(0).u64(KEEP_SECONDS).zeroes(8).attributes(of).0
}

/// Answer of a question for attributes.
pub fn attributes(of: &Attributes) -> Vec<u8> {
    Out::default().u64(KEEP_SECONDS).zeroes(8).attributes(of).0
}

/// Answer of an open. Reads go past the page cache of the file, as EROFS keeps what it reads in its own; and a reader
/// that waits for such a read can be killed.
pub fn opened(handle: u64) -> Vec<u8> {
    const DIRECT_IO: u32 = 1;
    Out::default().u64(handle).u32(DIRECT_IO).zeroes(4).0
}

/// Answer of an open of the directory.
pub fn opened_directory() -> Vec<u8> {
    Out::default().zeroes(16).0
}

/// Answer of the first request.
pub fn agreed(offer: &Offer) -> (Vec<u8>, Offer) {
    let wanted = ASYNC_READ | ASYNC_DIO | PARALLEL_DIROPS | MAX_PAGES | INIT_EXT | HAS_RESEND;
    let agreed = Offer { major: 7, minor: offer.minor.min(41), flags: offer.flags & wanted, ..*offer };
    // Reads that wait for the store hold one of these each: it must be many, or they keep others from being asked.
    const MAX_BACKGROUND: u16 = 8192;
    let out = Out::default()
        .u32(agreed.major)
        .u32(agreed.minor)
        .u32(agreed.max_readahead)
        .u32(agreed.flags as u32)
        .u16(MAX_BACKGROUND)
        .u16(MAX_BACKGROUND / 4 * 3)
        // Nothing is written: the least there is.
        .u32(4096)
        .u32(1)
        .u16((super::MAX_READ / 4096) as u16)
        .u16(0)
        .u32((agreed.flags >> 32) as u32)
        .zeroes(28);
    (out.0, agreed)
}

/// Answer of statfs(2).
pub fn file_system() -> Vec<u8> {
    Out::default().zeroes(40).u32(4096).u32(255).u32(4096).zeroes(28).0
}

/// Adds an entry to a listing unless it would be over `room`; tells whether it did.
pub fn push_entry(listing: &mut Vec<u8>, room: usize, node: u64, next: u64, directory: bool, name: &str) -> bool {
    let length = (24 + name.len()).next_multiple_of(8);
    if listing.len() + length > room {
        return false;
    }
    let kind = if directory { 4 } else { 8 };
    let end = listing.len() + length;
    let out = Out(std::mem::take(listing)).u64(node).u64(next).u32(name.len() as u32).u32(kind);
    *listing = out.0;
    listing.extend(name.as_bytes());
    listing.resize(end, 0);
    true
}

/// The header of an answer of so many bytes.
pub fn answer(unique: u64, length: usize) -> [u8; OUT_HEADER] {
    header(OUT_HEADER + length, 0, unique)
}

/// A refusal.
pub fn refusal(unique: u64, errno: Errno) -> [u8; OUT_HEADER] {
    header(OUT_HEADER, -errno.raw_os_error(), unique)
}

/// Asks for all requests that were handed out and not answered.
pub fn resend() -> [u8; OUT_HEADER] {
    header(OUT_HEADER, 7, 0)
}

/// Has the kernel forget a name of the directory.
pub fn invalidate(name: &str) -> Vec<u8> {
    let mut out = Vec::from(header(OUT_HEADER + 16 + name.len() + 1, 3, 0));
    out.extend(Out::default().u64(crate::id::ROOT).u32(name.len() as u32).u32(0).0);
    out.extend(name.as_bytes());
    out.push(0);
    out
}

fn header(length: usize, error: i32, unique: u64) -> [u8; OUT_HEADER] {
    let mut out = [0; OUT_HEADER];
    out[..4].copy_from_slice(&(length as u32).to_ne_bytes());
    out[4..8].copy_from_slice(&error.to_ne_bytes());
    out[8..].copy_from_slice(&unique.to_ne_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn answers_have_the_lengths_of_the_header_file() {
        let of = Attributes { node: 7, size: 4096, directory: false };
        assert_eq!((entry(&of).len(), attributes(&of).len(), opened(1).len(), file_system().len()), (128, 104, 16, 80));
        let (bytes, agreed) = agreed(&Offer { major: 7, minor: 45, max_readahead: 131_072, flags: u64::MAX });
        assert_eq!((bytes.len(), agreed.minor, agreed.flags & HAS_RESEND), (64, 41, HAS_RESEND));
        assert_eq!(invalidate("abc").len(), 16 + 16 + 4);
    }

    #[test]
    fn listings_end_where_there_is_no_room() {
        let mut listing = Vec::new();
        assert!(push_entry(&mut listing, 64, 2, 1, false, "eight"));
        assert!(push_entry(&mut listing, 64, 2, 1, true, "eight888"));
        assert!(!push_entry(&mut listing, 64, 2, 1, false, "n"));
        assert_eq!(listing.len(), 64);
    }

    proptest! {
        #[test]
        fn any_bytes_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Some(request) = Request::parse(&bytes) {
                let _parts = (request.name(), request.read(), request.open_flags(), request.interrupted());
                let _rest = (request.forgotten().count(), request.offer());
            }
        }
    }
}
