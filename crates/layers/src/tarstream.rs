//! Tar members from a stream, one after another, with every length bounded before memory is taken for it.
//!
//! Field decoding is the `tar` crate's; the walk is our own because a hostile long name or PAX header must not be able
//! to fill memory, and because PAX sparse members need their map.

use crate::error::EntryFault;
use crate::likeness;
use crate::sparse::{self, PaxSparse, SparseMap};
use std::io::{self, Read};
use tar::{EntryType, Header, PaxExtensions};

/// Longest PAX header or GNU long name: room for 64 KiB extended attributes, not for filling memory.
const MAX_EXTENSION_BYTES: u64 = 1 << 20;
const BLOCK: u64 = 512;

/// What a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemberKind {
    File,
    Directory,
    Symlink,
    Hardlink,
    Fifo,
    Device,
    Other(u8),
}

/// One member's metadata.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) name: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) kind: MemberKind,
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    pub(crate) mtime: (i64, u32),
    /// Size of the file with its holes.
    pub(crate) size: u64,
    pub(crate) sparse: Option<SparseMap>,
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// The stream is not a sound tar.
#[derive(Debug)]
pub(crate) enum TarError {
    Io(io::Error),
    Fault {
        name: Vec<u8>,
        fault: EntryFault,
    },
    /// Not a header where one should be: the bytes found.
    NoHeader(Vec<u8>),
}

impl From<io::Error> for TarError {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

#[derive(Default)]
struct Pending {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    pax: Option<Vec<u8>>,
}

#[derive(Default)]
struct Pax {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<(i64, u32)>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    sparse: PaxSparse,
    is_sparse: bool,
}

/// Reads members; while one is current, `Read` gives its stored bytes.
pub(crate) struct TarReader<R> {
    inner: R,
    left: u64,
    padding: u64,
    position: u64,
    ended: bool,
}

impl<R: Read> TarReader<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self { inner, left: 0, padding: 0, position: 0, ended: false }
    }

    /// Where in the stream the current member's unread data begins.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Whether the end marker was seen.
    pub(crate) fn ended(&self) -> bool {
        self.ended
    }

    /// Reads all that is left of the stream, so that its digest covers it.
    pub(crate) fn drain(mut self) -> io::Result<()> {
        io::copy(&mut self.inner, &mut io::sink()).map(drop)
    }

    /// The next member, after skipping what is unread of the current one; `None` at the end.
    ///
    /// # Errors
    /// The stream fails, ends within a member, or holds a malformed header.
    pub(crate) fn next_member(&mut self) -> Result<Option<Member>, TarError> {
        let mut pending = Pending::default();
        loop {
            self.skip_current()?;
            let Some(header) = self.header()? else { return Ok(None) };
            let kind = header.entry_type();
            let size = header.entry_size().map_err(|_| fault(&header, "size"))?;
            match kind {
                EntryType::GNULongName => pending.name = Some(trim_nul(self.extension(&header, size)?)),
                EntryType::GNULongLink => pending.link = Some(trim_nul(self.extension(&header, size)?)),
                EntryType::XHeader => pending.pax = Some(self.extension(&header, size)?),
                // Global headers carry comments (git archive); per-file values in them are not honoured.
                EntryType::XGlobalHeader => {
                    self.extension(&header, size)?;
                }
                _ => return self.member(&header, size, pending).map(Some),
            }
        }
    }

    fn skip_current(&mut self) -> io::Result<()> {
        let skip = self.left + self.padding;
        let got = io::copy(&mut (&mut self.inner).take(skip), &mut io::sink())?;
        self.position += got;
        if got < skip {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (self.left, self.padding) = (0, 0);
        Ok(())
    }

    fn header(&mut self) -> Result<Option<Header>, TarError> {
        let mut header = Header::new_old();
        let bytes = header.as_mut_bytes();
        let mut filled = 0;
        while filled < bytes.len() {
            match self.inner.read(&mut bytes[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                // A file shorter than one header that is something else was not cut short.
                Ok(0) if self.position == 0 && likeness::is_foreign(&bytes[..filled]) => {
                    return Err(TarError::NoHeader(bytes[..filled].to_vec()));
                }
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
        self.position += BLOCK;
        let bytes = header.as_bytes();
        if bytes.iter().all(|b| *b == 0) {
            self.ended = true;
            return Ok(None);
        }
        let sum: u32 =
            bytes.iter().enumerate().map(|(i, b)| if (148..156).contains(&i) { 32 } else { u32::from(*b) }).sum();
        if header.cksum().ok() != Some(sum) {
            return Err(TarError::NoHeader(bytes.to_vec()));
        }
        Ok(Some(header))
    }

    fn extension(&mut self, header: &Header, size: u64) -> Result<Vec<u8>, TarError> {
        if size > MAX_EXTENSION_BYTES {
            return Err(fault(header, "an extended header is longer than 1 MiB"));
        }
        self.begin(size);
        let mut out = vec![0; size as usize];
        self.read_exact(&mut out)?;
        Ok(out)
    }

    fn begin(&mut self, size: u64) {
        self.left = size;
        self.padding = (BLOCK - size % BLOCK) % BLOCK;
    }

    fn member(&mut self, header: &Header, header_size: u64, pending: Pending) -> Result<Member, TarError> {
        let mut pax = match pending.pax {
            Some(raw) => {
                parse_pax(&raw).map_err(|f| TarError::Fault { name: header.path_bytes().into_owned(), fault: f })?
            }
            None => Pax::default(),
        };
        let name = pax.sparse.name.take().or(pax.name.take()).or(pending.name);
        let name = name.unwrap_or_else(|| header.path_bytes().into_owned());
        let refuse = |f: EntryFault| TarError::Fault { name: name.clone(), fault: f };
        let link = pax.link.take().or(pending.link);
        let link = link.unwrap_or_else(|| header.link_name_bytes().map(|l| l.into_owned()).unwrap_or_default());
        let kind = match header.entry_type() {
            EntryType::Regular | EntryType::Continuous if name.ends_with(b"/") => MemberKind::Directory,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => MemberKind::File,
            EntryType::Directory => MemberKind::Directory,
            EntryType::Symlink => MemberKind::Symlink,
            EntryType::Link => MemberKind::Hardlink,
            EntryType::Fifo => MemberKind::Fifo,
            EntryType::Char | EntryType::Block => MemberKind::Device,
            other => MemberKind::Other(other.as_byte()),
        };
        // Links, nodes and directories have no data whatever their size field says, as in GNU tar and Go's archive/tar.
        let has_data = matches!(kind, MemberKind::File | MemberKind::Other(_));
        let stored = if has_data { pax.size.unwrap_or(header_size) } else { 0 };
        let mut real_size = stored;
        let mut map = None;
        if header.entry_type() == EntryType::GNUSparse {
            let (segments, size, blocks) = sparse::gnu_map(header, &mut self.inner)?.map_err(refuse)?;
            self.position += BLOCK * blocks;
            real_size = size;
            map = Some(sparse::checked(segments, size, stored).map_err(refuse)?);
            self.begin(stored);
        } else {
            self.begin(stored);
            if pax.is_sparse {
                let (segments, used) = if pax.sparse.in_data {
                    sparse::map_in_data(self)?.map_err(refuse)?
                } else {
                    (pax.sparse.take_map(), 0)
                };
                real_size = pax.sparse.real_size.ok_or(EntryFault::BadSparseMap).map_err(refuse)?;
                map = Some(sparse::checked(segments, real_size, stored - used).map_err(refuse)?);
            }
        }
        let bad = |what| refuse(EntryFault::BadHeader(what));
        Ok(Member {
            mode: header.mode().map_err(|_| bad("mode"))?,
            uid: pax.uid.map_or_else(|| header.uid(), Ok).map_err(|_| bad("uid"))?,
            gid: pax.gid.map_or_else(|| header.gid(), Ok).map_err(|_| bad("gid"))?,
            mtime: match pax.mtime {
                Some(t) => t,
                None => (i64::try_from(header.mtime().map_err(|_| bad("mtime"))?).unwrap_or(0), 0),
            },
            kind,
            link,
            size: real_size,
            sparse: map,
            xattrs: pax.xattrs,
            name,
        })
    }
}

impl<R: Read> Read for TarReader<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let want = buf.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if want == 0 {
            return Ok(0);
        }
        match self.inner.read(&mut buf[..want])? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            n => {
                self.left -= n as u64;
                self.position += n as u64;
                Ok(n)
            }
        }
    }
}

fn fault(header: &Header, what: &'static str) -> TarError {
    TarError::Fault { name: header.path_bytes().into_owned(), fault: EntryFault::BadHeader(what) }
}

fn trim_nul(mut name: Vec<u8>) -> Vec<u8> {
    // The terminator only: a NUL within a name is left for the name check to refuse.
    if name.last() == Some(&0) {
        name.pop();
    }
    name
}

fn parse_pax(raw: &[u8]) -> Result<Pax, EntryFault> {
    let mut pax = Pax::default();
    let number = |value: &[u8]| {
        std::str::from_utf8(value).ok().and_then(|t| t.parse().ok()).ok_or(EntryFault::BadHeader("PAX number"))
    };
    for record in PaxExtensions::new(raw) {
        let record = record.map_err(|_| EntryFault::BadHeader("PAX record"))?;
        let value = record.value_bytes();
        match record.key_bytes() {
            b"path" => pax.name = Some(value.to_vec()),
            b"linkpath" => pax.link = Some(value.to_vec()),
            b"size" => pax.size = Some(number(value)?),
            b"uid" => pax.uid = Some(number(value)?),
            b"gid" => pax.gid = Some(number(value)?),
            b"mtime" => pax.mtime = Some(time(value)?),
            key => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    pax.xattrs.push((name.to_vec(), value.to_vec()));
                } else if key.starts_with(b"GNU.sparse.") {
                    pax.is_sparse = true;
                    pax.sparse.record(key, value)?;
                }
            }
        }
    }
    Ok(pax)
}

/// `[-]seconds[.fraction]`, times before the epoch rounded towards it.
fn time(value: &[u8]) -> Result<(i64, u32), EntryFault> {
    let bad = || EntryFault::BadHeader("PAX mtime");
    let text = std::str::from_utf8(value).map_err(|_| bad())?;
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = seconds.parse().map_err(|_| bad())?;
    if fraction.bytes().any(|b| !b.is_ascii_digit()) {
        return Err(bad());
    }
    let nanos = format!("{:0<9.9}", fraction).parse().map_err(|_| bad())?;
    Ok((seconds.max(0), if seconds < 0 { 0 } else { nanos }))
}
