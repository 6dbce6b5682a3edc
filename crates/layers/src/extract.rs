//! Applying one tar stream to a stage, with digests, sizes and bounds checked while it streams.

use crate::config::{CancelFlag, Limits};
use crate::error::{EntryFault, ImportError};
use crate::likeness;
use crate::paths;
use crate::stage::{Meta, Stage, StageError, read_full};
use crate::stream::{self, Codec, Meter, StreamFault};
use crate::tarstream::{Member, MemberKind, TarError, TarReader};
use corral_api::digest::Digest;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

/// What was unpacked so far, against the bounds of the whole import.
pub(crate) struct Budget {
    limits: Limits,
    /// Unpacked bytes: of streams, and of holes that a sparse file adds.
    pub(crate) bytes: u64,
    entries: u64,
    /// Device nodes left out beneath `dev/`.
    pub(crate) devices_dropped: u64,
    /// Sockets left out of a directory source.
    pub(crate) sockets_dropped: u64,
}

impl Budget {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, bytes: 0, entries: 0, devices_dropped: 0, sockets_dropped: 0 }
    }

    /// Counts one entry, and the directories the stage made on its own.
    pub(crate) fn entry(&mut self, implied: u64, source_name: &str) -> Result<(), ImportError> {
        self.entries += 1;
        if self.entries + implied > self.limits.max_entries {
            let limit = self.limits.max_entries;
            return Err(ImportError::TooManyEntries { source_name: source_name.to_owned(), limit });
        }
        Ok(())
    }

    /// Counts bytes that a file will have.
    pub(crate) fn take(&mut self, bytes: u64, source_name: &str) -> Result<(), ImportError> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > self.limits.max_unpacked_bytes {
            let limit = self.limits.max_unpacked_bytes;
            return Err(ImportError::TooLarge { source_name: source_name.to_owned(), limit });
        }
        Ok(())
    }

    fn left(&self) -> u64 {
        self.limits.max_unpacked_bytes.saturating_sub(self.bytes)
    }
}

/// What is known of a stream beforehand.
pub(crate) struct Expected {
    pub(crate) name: String,
    pub(crate) codec: Option<Codec>,
    pub(crate) size: Option<u64>,
    pub(crate) digest: Option<Digest>,
    pub(crate) diff_id: Option<Digest>,
    /// Whether `.wh.` names are deletions.
    pub(crate) whiteouts: bool,
}

/// Applies a stream beneath the directory `at` of the stage.
///
/// # Errors
/// Anything wrong with the stream or an entry; the stage is then of no use any more.
pub(crate) fn apply_stream(
    stage: &mut Stage,
    at: &[&[u8]],
    raw: impl Read,
    expected: &Expected,
    budget: &mut Budget,
    cancel: &CancelFlag,
    on_bytes: impl FnMut(u64),
) -> Result<(), ImportError> {
    let name = expected.name.as_str();
    let (mut meter, blob) = Meter::new(raw, cancel);
    if let Some(size) = expected.size {
        meter = meter.bounded(size, |expected| StreamFault::TooLong { expected });
    }
    let mut meter = meter.watched(on_bytes);
    let result = decode_and_apply(stage, at, &mut meter, expected, budget, cancel);
    if let Err(e @ (ImportError::Truncated { .. } | ImportError::Corrupt { .. } | ImportError::UnknownFormat { .. })) =
        result
    {
        // Bytes that do not decode are best described by the digest or size they fail to have.
        io::copy(&mut meter, &mut io::sink()).map_err(|e| stream::classify(e, name))?;
        check_blob(expected, &blob.borrow())?;
        return Err(e);
    }
    result?;
    io::copy(&mut meter, &mut io::sink()).map_err(|e| stream::classify(e, name))?;
    check_blob(expected, &blob.borrow())
}

fn check_blob(expected: &Expected, blob: &stream::Seen) -> Result<(), ImportError> {
    let source_name = expected.name.clone();
    if let Some(size) = expected.size.filter(|size| *size != blob.bytes) {
        return Err(ImportError::SizeMismatch { source_name, expected: size, actual: blob.bytes });
    }
    check_digest(expected.digest, blob, source_name)
}

fn check_digest(expected: Option<Digest>, seen: &stream::Seen, source_name: String) -> Result<(), ImportError> {
    let Some(expected) = expected else { return Ok(()) };
    let actual = seen.digest();
    if actual == expected { Ok(()) } else { Err(ImportError::DigestMismatch { source_name, expected, actual }) }
}

fn decode_and_apply(
    stage: &mut Stage,
    at: &[&[u8]],
    raw: impl Read,
    expected: &Expected,
    budget: &mut Budget,
    cancel: &CancelFlag,
) -> Result<(), ImportError> {
    let name = expected.name.as_str();
    let limit = budget.limits.max_unpacked_bytes;
    let decoded = stream::decode(raw, expected.codec).map_err(|e| stream::classify(e, name))?;
    let (meter, unpacked) = Meter::new(decoded, cancel);
    let left = budget.left();
    let mut tar = TarReader::new(meter.bounded(left, |limit| StreamFault::TooLarge { limit }));
    let restate = |e| match e {
        ImportError::TooLarge { source_name, .. } => ImportError::TooLarge { source_name, limit },
        other => other,
    };
    stage.begin_layer();
    let mut members = 0u64;
    loop {
        let member = match tar.next_member() {
            Ok(Some(member)) => member,
            Ok(None) => break,
            Err(TarError::NoHeader(head)) if members == 0 => return Err(no_tar(name, &head)),
            Err(e) => return Err(restate(tar_error(e, name))),
        };
        members += 1;
        budget.entry(stage.implied(), name)?;
        apply_member(stage, at, &mut tar, member, expected, budget).map_err(restate)?;
    }
    // The end marker may be missing (some writers leave it out) only where a digest vouches for the whole.
    if tar.position() == 0 {
        return Err(no_tar(name, &[]));
    }
    if !tar.ended() && expected.diff_id.is_none() && expected.digest.is_none() {
        return Err(ImportError::Truncated { source_name: name.to_owned() });
    }
    tar.drain().map_err(|e| restate(stream::classify(e, name)))?;
    let unpacked = unpacked.borrow();
    budget.bytes += unpacked.bytes;
    check_digest(expected.diff_id, &unpacked, format!("{name} (uncompressed)"))
}

/// The stream does not even begin as a tar.
fn no_tar(source_name: &str, head: &[u8]) -> ImportError {
    ImportError::UnknownFormat {
        source_name: source_name.to_owned(),
        wanted: "a tar archive, plain or compressed with gzip or zstd",
        found: likeness::of(head),
    }
}

fn tar_error(e: TarError, source_name: &str) -> ImportError {
    match e {
        TarError::Io(e) => stream::classify(e, source_name),
        TarError::NoHeader(_) => {
            ImportError::Corrupt { source_name: source_name.to_owned(), reason: "not a tar header".to_owned() }
        }
        TarError::Fault { name, fault } => {
            ImportError::Entry { source_name: source_name.to_owned(), entry: paths::display(&name), fault }
        }
    }
}

fn apply_member(
    stage: &mut Stage,
    at: &[&[u8]],
    tar: &mut TarReader<impl Read>,
    mut member: Member,
    expected: &Expected,
    budget: &mut Budget,
) -> Result<(), ImportError> {
    let source_name = &expected.name;
    if member.kind == MemberKind::File {
        // Stored bytes are counted with the stream; holes cost nothing there but may on the way out.
        let stored: u64 = member.sparse.as_ref().map_or(member.size, |map| map.iter().map(|(_, len)| len).sum());
        budget.take(member.size - stored, source_name)?;
    }
    let name = std::mem::take(&mut member.name);
    put(stage, at, &name, tar, member, expected.whiteouts, budget).map_err(|e| match e {
        StageError::Fault(fault) => {
            ImportError::Entry { source_name: source_name.clone(), entry: paths::display(&name), fault }
        }
        StageError::Io(e) if e.kind() == io::ErrorKind::UnexpectedEof || e.get_ref().is_some() => {
            stream::classify(e, source_name)
        }
        StageError::Io(e) => ImportError::io("unpack into", stage.host_path(), e),
    })
}

fn put(
    stage: &mut Stage,
    at: &[&[u8]],
    name: &[u8],
    tar: &mut TarReader<impl Read>,
    member: Member,
    whiteouts: bool,
    budget: &mut Budget,
) -> Result<(), StageError> {
    let own = paths::components(name)?;
    let parts = [at, &own].concat();
    if whiteouts
        && let Some((last, parent)) = own.split_last()
        && let Some(hidden) = last.strip_prefix(b".wh.")
    {
        let parent = [at, parent].concat();
        return match hidden {
            b".wh..opq" => stage.opaque(&parent),
            // AUFS's own files (`.wh..wh.plnk` and the like), as every extractor drops them.
            _ if hidden.starts_with(b".wh.") => Ok(()),
            _ => stage.whiteout(&parent, hidden),
        };
    }
    if let MemberKind::Other(kind) = member.kind {
        return Err(EntryFault::UnsupportedType(char::from(kind)).into());
    }
    if member.kind == MemberKind::Device {
        // Sandboxes get a /dev of their own; what an archive holds there is left out, elsewhere it is hostile.
        if own.first() == Some(&&b"dev"[..]) {
            budget.devices_dropped += 1;
            return Ok(());
        }
        return Err(EntryFault::Device.into());
    }
    if member.kind == MemberKind::Hardlink {
        let target = link_target(at, &member.link)?;
        return stage.put_hardlink(&parts, &target);
    }
    let meta = Meta::checked(member.mode, (member.uid, member.gid), member.mtime, member.xattrs)?;
    match member.kind {
        MemberKind::Directory => stage.put_dir(&parts, &meta),
        MemberKind::Symlink => stage.put_symlink(&parts, &member.link, &meta),
        MemberKind::Fifo => stage.put_fifo(&parts, &meta),
        _ => {
            let file = File::from(stage.create_file(&parts)?);
            match &member.sparse {
                Some(map) => {
                    file.set_len(member.size)?;
                    for (offset, length) in map {
                        copy_exact(&file, tar, *offset, *length)?;
                    }
                }
                None => write_holes(&file, tar)?,
            }
            stage.finish_file(&file, &meta)
        }
    }
}

/// A hard link's target lies in the same archive, so beneath `at` as well.
fn link_target(at: &[&[u8]], link: &[u8]) -> Result<Vec<u8>, StageError> {
    let outside = || EntryFault::LinkOutside { target: paths::display(link) };
    let own = paths::components(link).map_err(|_| outside())?;
    Ok([at, &own].concat().join(&b'/'))
}

fn copy_exact(file: &File, reader: &mut impl Read, offset: u64, length: u64) -> io::Result<()> {
    let mut buf = vec![0; length.clamp(1, 256 << 10) as usize];
    let mut done = 0;
    while done < length {
        let want = (length - done).min(buf.len() as u64) as usize;
        reader.read_exact(&mut buf[..want])?;
        file.write_all_at(&buf[..want], offset + done)?;
        done += want as u64;
    }
    Ok(())
}

/// Runs of zeros shorter than this are written as data.
const HOLE: usize = 64 << 10;

/// Copies a stream into a new file, leaving aligned runs of 64 KiB of zeros as holes.
pub(crate) fn write_holes(file: &File, reader: &mut impl Read) -> io::Result<()> {
    let mut buf = vec![0; HOLE];
    let (mut offset, mut ends_in_hole) = (0, false);
    loop {
        let n = read_full(reader, &mut buf)?;
        if n == HOLE && buf.iter().all(|b| *b == 0) {
            ends_in_hole = true;
        } else if n > 0 {
            file.write_all_at(&buf[..n], offset)?;
            ends_in_hole = false;
        }
        offset += n as u64;
        if n < HOLE {
            break;
        }
    }
    if ends_in_hole { file.set_len(offset) } else { Ok(()) }
}
