//! What a `COPY` or `ADD` puts into a sandbox: pieces of a tree, and the tar stream they make.

use super::context::{Compression, compression, head};
use super::tree::{Bytes, Entry, Tree};
use axum::body::Body;
use bytes::Bytes as Chunk;
use corral_api::problem::{ErrorKind, Problem};
use corral_dockerfile::{CopySource, CopyStep, EntryKind, Owner, clean, key, select};
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Permission bits of files given in the Dockerfile.
const INLINE_MODE: u32 = 0o644;
/// Permission bits of directories made on the way to a destination.
const MADE_MODE: u32 = 0o755;
/// Chunks of a stream that wait for a slow node.
const QUEUE: usize = 8;
const CHUNK: usize = 256 << 10;

/// Something to put in place.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Where, below the destination; the name of a file that is a source.
    pub to: Vec<u8>,
    /// It lies in a directory that is a source.
    pub inner: bool,
    /// What it is.
    pub what: What,
}

/// What a piece is.
#[derive(Debug, Clone)]
pub enum What {
    /// An entry of the tree.
    Entry(Entry),
    /// An archive of the tree, to be unpacked.
    Archive(Bytes, Compression),
    /// A text of the Dockerfile.
    Text(String),
}

fn io_problem(error: &io::Error) -> Problem {
    if error.kind() != io::ErrorKind::BrokenPipe {
        tracing::error!(%error, "a spooled file cannot be read");
    }
    Problem::new(ErrorKind::StorageError, "the gateway cannot read what it stored for the build")
}

/// Finds what a step copies. Blocks.
///
/// # Errors
/// A source is missing, or an archive cannot be read.
pub fn find(tree: &Tree, step: &CopyStep) -> Result<Vec<Piece>, Problem> {
    let mut pieces = Vec::new();
    for source in &step.sources {
        let path = match source {
            CopySource::Path(path) => path,
            CopySource::Inline { name, text } => {
                pieces.push(Piece { to: name.clone().into_bytes(), inner: false, what: What::Text(text.clone()) });
                continue;
            }
        };
        let selected =
            select(&tree.entries, path).map_err(|e| Problem::new(ErrorKind::InvalidRequest, e.to_string()))?;
        for selected in selected {
            let Some(entry) = tree.entries.get(&selected.path) else {
                // The top of the tree, which is no entry of it: what lies in it counts.
                continue;
            };
            let mut what = What::Entry(entry.clone());
            if step.unpack && !selected.inner && entry.kind == EntryKind::File {
                match archive(tree, entry.bytes).map_err(|e| io_problem(&e))? {
                    Compression::None => {}
                    Compression::Other(name) => {
                        let shown: String = path.chars().take(80).collect();
                        let text = format!("source {shown:?}: unpacking what {name} compressed is not supported");
                        return Err(Problem::new(ErrorKind::Unsupported, text));
                    }
                    known => what = What::Archive(entry.bytes, known),
                }
                if matches!(what, What::Entry(_)) && is_tar(tree.reader(entry.bytes)) {
                    what = What::Archive(entry.bytes, Compression::None);
                }
            }
            pieces.push(Piece { to: selected.to, inner: selected.inner, what });
        }
    }
    Ok(pieces)
}

/// How a file is compressed, if it is an archive below that.
fn archive(tree: &Tree, bytes: Bytes) -> io::Result<Compression> {
    let kind = compression(&head(&mut tree.reader(bytes), 8)?);
    let is_archive = match kind {
        Compression::None => false,
        Compression::Other(_) => true,
        known => is_tar(decoder(tree, bytes, known)?),
    };
    Ok(if is_archive { kind } else { Compression::None })
}

fn is_tar(reader: impl Read) -> bool {
    let mut archive = tar::Archive::new(reader);
    archive.entries().is_ok_and(|mut entries| entries.next().is_some_and(|entry| entry.is_ok()))
}

fn decoder(tree: &Tree, bytes: Bytes, compression: Compression) -> io::Result<Box<dyn Read>> {
    let reader = io::BufReader::with_capacity(CHUNK, tree.reader(bytes));
    Ok(match compression {
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(reader)),
        Compression::Zstd => Box::new(zstd::Decoder::with_buffer(reader)?),
        Compression::None | Compression::Other(_) => Box::new(reader),
    })
}

/// What the pieces are, for the step's key. Blocks.
///
/// # Errors
/// The archive cannot be read.
pub fn contents(tree: &Tree, pieces: &[Piece]) -> Result<Vec<key::Content>, Problem> {
    let of = |piece: &Piece| {
        let file = |mode, bytes| Ok(("file", mode, Some(tree.digest(bytes).map_err(|e| io_problem(&e))?)));
        let (kind, mode, digest) = match &piece.what {
            What::Entry(entry) => match &entry.kind {
                EntryKind::File => file(entry.mode, entry.bytes)?,
                EntryKind::Directory => ("directory", entry.mode, None),
                EntryKind::Symlink(target) => ("symlink", 0, Some(corral_api::digest::Digest::of(target))),
            },
            What::Archive(bytes, _) => file(0, *bytes)?,
            // The text is part of the step.
            What::Text(_) => ("file", INLINE_MODE, None),
        };
        Ok(key::Content { to: piece.to.clone(), kind, mode, digest })
    };
    pieces.iter().map(of).collect()
}

/// How pieces are put in place.
#[derive(Debug, Clone)]
pub struct Placing {
    /// Directories to make below the one that is there, outermost first.
    pub missing: Vec<String>,
    /// Name of the only file, where it is not its own.
    pub rename: Option<String>,
    /// Owner instead of the pieces' own.
    pub owner: Option<Owner>,
    /// Permission bits instead of the pieces' own.
    pub mode: Option<u32>,
}

/// The tar stream of pieces, and the task that makes it.
pub fn stream(tree: Arc<Tree>, pieces: Vec<Piece>, placing: Placing) -> (Body, JoinHandle<Result<(), Problem>>) {
    let (send, receive) = mpsc::channel::<io::Result<Chunk>>(QUEUE);
    let task = tokio::task::spawn_blocking(move || {
        let mut tar = tar::Builder::new(Sender { send: send.clone(), held: Vec::with_capacity(CHUNK) });
        let written = write(&mut tar, &tree, &pieces, &placing).and_then(|()| {
            let finished = tar.into_inner().and_then(|mut sender| sender.flush());
            finished.map_err(|e| io_problem(&e))
        });
        if written.is_err() {
            // Breaks the upload off, so that the node keeps nothing of it.
            send.blocking_send(Err(io::ErrorKind::UnexpectedEof.into())).unwrap_or(());
        }
        written
    });
    let chunks = futures_util::stream::unfold(receive, async |mut receive| Some((receive.recv().await?, receive)));
    (Body::from_stream(chunks), task)
}

struct Sender {
    send: mpsc::Sender<io::Result<Chunk>>,
    held: Vec<u8>,
}

impl Write for Sender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(CHUNK - self.held.len());
        self.held.extend_from_slice(&bytes[..n]);
        if self.held.len() == CHUNK {
            self.flush()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let chunk = Chunk::from(std::mem::replace(&mut self.held, Vec::with_capacity(CHUNK)));
        self.send.blocking_send(Ok(chunk)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

type Tar = tar::Builder<Sender>;

fn write(tar: &mut Tar, tree: &Tree, pieces: &[Piece], placing: &Placing) -> Result<(), Problem> {
    let failed = |e: io::Error| io_problem(&e);
    let mut base = String::new();
    let made = placing.owner.unwrap_or_default();
    for name in &placing.missing {
        base.push_str(name);
        base.push('/');
        let mut header = header(tar::EntryType::Directory, MADE_MODE, made, now());
        tar.append_data(&mut header, &base, io::empty()).map_err(failed)?;
    }
    for piece in pieces {
        let name = placing.rename.as_deref().map_or(piece.to.as_slice(), str::as_bytes);
        let to = below(&base, name);
        match &piece.what {
            // A source that is a directory stands for what lies in it.
            What::Entry(entry) if entry.kind == EntryKind::Directory && piece.to.is_empty() => {}
            What::Entry(entry) => {
                let owner = placing.owner.unwrap_or(Owner { uid: entry.owner.0, gid: entry.owner.1 });
                let mode = placing.mode.unwrap_or(entry.mode);
                match &entry.kind {
                    EntryKind::Directory => {
                        let mut header = header(tar::EntryType::Directory, mode, owner, entry.mtime);
                        tar.append_data(&mut header, to.join(""), io::empty())
                    }
                    EntryKind::Symlink(target) => {
                        let mut header = header(tar::EntryType::Symlink, 0o777, owner, entry.mtime);
                        tar.append_link(&mut header, &to, path_of(target))
                    }
                    EntryKind::File => {
                        let mut header = header(tar::EntryType::Regular, mode, owner, entry.mtime);
                        header.set_size(entry.bytes.size);
                        tar.append_data(&mut header, &to, tree.reader(entry.bytes))
                    }
                }
                .map_err(failed)?;
            }
            What::Text(text) => {
                let mode = placing.mode.unwrap_or(INLINE_MODE);
                let mut header = header(tar::EntryType::Regular, mode, placing.owner.unwrap_or_default(), now());
                header.set_size(text.len() as u64);
                tar.append_data(&mut header, &to, text.as_bytes()).map_err(failed)?;
            }
            What::Archive(bytes, compression) => {
                let reader = decoder(tree, *bytes, *compression).map_err(failed)?;
                unpack(tar, reader, &base, &piece.to, placing)?;
            }
        }
    }
    Ok(())
}

/// Passes the entries of an archive on. What is hostile in it the sandbox's own file worker refuses.
fn unpack(tar: &mut Tar, reader: impl Read, base: &str, name: &[u8], placing: &Placing) -> Result<(), Problem> {
    let short = |name: &[u8]| -> String { String::from_utf8_lossy(name).chars().take(80).collect() };
    let shown = short(name);
    let broken = |e: io::Error| match e.kind() {
        io::ErrorKind::BrokenPipe => io_problem(&e),
        _ => Problem::new(ErrorKind::InvalidRequest, format!("the archive {shown:?} cannot be unpacked: {e}")),
    };
    let mut archive = tar::Archive::new(reader);
    for entry in archive.entries().map_err(broken)? {
        let mut entry = entry.map_err(broken)?;
        let path = clean(&entry.path_bytes()).ok_or_else(|| {
            let name = short(&entry.path_bytes());
            let text = format!("the archive {shown:?} holds {name:?}, which leads out of it");
            Problem::new(ErrorKind::InvalidRequest, text)
        })?;
        if path.is_empty() {
            continue;
        }
        let mut header = entry.header().clone();
        if let Some(owner) = placing.owner {
            header.set_uid(owner.uid.into());
            header.set_gid(owner.gid.into());
        }
        let to = below(base, &path);
        let link = entry.link_name_bytes().map(std::borrow::Cow::into_owned);
        match (header.entry_type(), link) {
            (tar::EntryType::XGlobalHeader, _) => Ok(()),
            (tar::EntryType::Symlink, Some(link)) => tar.append_link(&mut header, to, path_of(&link)),
            // Of an entry of the same archive.
            (tar::EntryType::Link, Some(link)) => {
                tar.append_link(&mut header, to, path_of(&[base.as_bytes(), &clean(&link).unwrap_or(link)].concat()))
            }
            _ => {
                header.set_size(entry.size());
                tar.append_data(&mut header, to, &mut entry)
            }
        }
        .map_err(broken)?;
    }
    Ok(())
}

/// A path of an archive, byte for byte.
fn path_of(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// A name that has no room in a header leaves there the text that it begins with, which the crate `tar` refuses to be
/// nothing: below `./` it is something.
fn below(base: &str, name: &[u8]) -> PathBuf {
    let top: &[u8] = if base.is_empty() && name.first().is_some_and(|byte| !byte.is_ascii()) { b"./" } else { b"" };
    path_of(&[top, base.as_bytes(), name].concat()).to_owned()
}

fn header(kind: tar::EntryType, mode: u32, owner: Owner, mtime: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(owner.uid.into());
    header.set_gid(owner.gid.into());
    header.set_mtime(mtime);
    header.set_size(0);
    header
}

fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt as _;

    #[tokio::test]
    async fn names_that_are_no_text_are_put_in_place_as_they_are() {
        let link = Entry {
            kind: EntryKind::Symlink(b"to/caf\xe9".into()),
            mode: 0o777,
            owner: (0, 0),
            mtime: 0,
            bytes: Bytes::default(),
        };
        let directory = Entry { kind: EntryKind::Directory, ..link.clone() };
        let pieces = [(&b"\xff"[..], directory), (b"\xff/caf\xe9", link)];
        let pieces = pieces.map(|(to, entry)| Piece { to: to.into(), inner: true, what: What::Entry(entry) });
        let contents = contents(&Tree::default(), &pieces).unwrap();
        let keys: Vec<_> =
            contents.iter().map(|content| serde_json::to_value(content).unwrap()["to"].clone()).collect();
        assert_eq!(keys[0], serde_json::json!([255]));
        let long = below("", &b"\xff".repeat(150));
        let mut sent = tar::Builder::new(Vec::new());
        let mut longest = header(tar::EntryType::Regular, 0o644, Owner::default(), 0);
        sent.append_data(&mut longest, long, io::empty()).unwrap();
        let placing = Placing { missing: vec!["d".to_owned()], rename: None, owner: None, mode: None };
        let (body, task) = stream(Arc::default(), pieces.into(), placing);
        let bytes = body.collect().await.unwrap().to_bytes();
        task.await.unwrap().unwrap();
        let mut archive = tar::Archive::new(&bytes[..]);
        let found = archive.entries().unwrap().map(|entry| {
            let entry = entry.unwrap();
            (entry.path_bytes().into_owned(), entry.link_name_bytes().map(std::borrow::Cow::into_owned))
        });
        let link = (b"d/\xff/caf\xe9".to_vec(), Some(b"to/caf\xe9".to_vec()));
        assert_eq!(found.collect::<Vec<_>>(), [(b"d/".to_vec(), None), (b"d/\xff/".to_vec(), None), link]);
    }
}
