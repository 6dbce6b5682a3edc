//! The build context: spooled as it comes, decompressed, indexed, with the Dockerfile taken out and `.dockerignore`
//! heeded.

use super::tree::Tree;
use crate::refusal::Refusal;
use axum::body::Body;
use corral_api::problem::{ErrorKind, Problem};
use corral_dockerfile::{EntryKind, Ignore, select};
use futures_util::StreamExt as _;
use std::fs::File;
use std::io::{self, Read, Seek as _, Write as _};
use std::path::Path;
use tokio::io::AsyncWriteExt as _;

/// How the context is called in errors.
const NAME: &str = "the build context";
/// The largest Dockerfile or `.dockerignore`.
const TEXT_LIMIT: u64 = 1 << 20;

/// A context and its Dockerfile.
#[derive(Debug)]
pub struct Context {
    /// What `COPY` takes.
    pub tree: Tree,
    /// Text of the Dockerfile.
    pub dockerfile: String,
}

fn refused(kind: ErrorKind, text: impl Into<String>) -> Problem {
    Problem::new(kind, text)
}

fn store_failed(error: &io::Error) -> Problem {
    tracing::error!(%error, "a build context cannot be stored");
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            refused(ErrorKind::InsufficientStorage, "the gateway's disk is too full for the build context")
        }
        _ => refused(ErrorKind::StorageError, "the gateway cannot store the build context"),
    }
}

/// Writes a body to a file that is gone with its descriptor.
///
/// # Errors
/// It is larger than allowed, breaks off, or the disk refuses.
pub async fn spool(body: Body, dir: &Path, limit: u64, what: &str) -> Result<File, Refusal> {
    let file = tempfile::tempfile_in(dir).map_err(|e| store_failed(&e))?;
    let mut out = tokio::io::BufWriter::with_capacity(1 << 20, tokio::fs::File::from_std(file));
    let mut body = body.into_data_stream();
    let mut total = 0u64;
    while let Some(piece) = body.next().await {
        let piece = piece.map_err(|_| Refusal::invalid(format!("{what} broke off")))?;
        total += piece.len() as u64;
        if total > limit {
            return Err(refused(ErrorKind::TooLarge, format!("{what} is larger than {limit} bytes")).into());
        }
        out.write_all(&piece).await.map_err(|e| store_failed(&e))?;
    }
    out.flush().await.map_err(|e| store_failed(&e))?;
    Ok(out.into_inner().into_std().await)
}

impl Context {
    /// Reads a spooled context. Blocks.
    ///
    /// # Errors
    /// It is no archive, holds what none may hold, has no Dockerfile, or expands beyond `limit` bytes.
    pub fn open(spooled: File, dir: &Path, limit: u64, dockerfile: &str) -> Result<Self, Problem> {
        let file = decompress(spooled, dir, limit)?;
        let mut tree = Tree::index(file, "", NAME)?;
        let text = read_text(&tree, dockerfile)?.ok_or_else(|| {
            let shown: String = dockerfile.chars().take(200).collect();
            refused(ErrorKind::InvalidRequest, format!("{NAME} has no file {shown:?}"))
        })?;
        // One beside the Dockerfile is for this Dockerfile alone.
        let own = read_text(&tree, &format!("{dockerfile}.dockerignore"))?;
        let ignore = match own {
            Some(own) => Some(own),
            None => read_text(&tree, ".dockerignore")?,
        };
        if let Some(ignore) = ignore {
            let ignore = Ignore::new(&ignore).map_err(|e| refused(ErrorKind::InvalidRequest, e.to_string()))?;
            tree.leave_out(|path| ignore.excludes(path));
        }
        for entry in tree.entries.values_mut() {
            // Whose files they were where they come from means nothing here.
            entry.owner = (0, 0);
        }
        Ok(Self { tree, dockerfile: text })
    }
}

fn read_text(tree: &Tree, path: &str) -> Result<Option<String>, Problem> {
    // A name, not a pattern.
    let literal = path.chars().flat_map(|c| matches!(c, '*' | '?' | '[' | '\\').then_some('\\').into_iter().chain([c]));
    let Ok(selected) = select(&tree.entries, &literal.collect::<String>()) else { return Ok(None) };
    let found = selected.first().and_then(|s| tree.entries.get(&s.path)).filter(|e| e.kind == EntryKind::File);
    let Some(entry) = found else { return Ok(None) };
    if entry.bytes.size > TEXT_LIMIT {
        return Err(refused(ErrorKind::TooLarge, format!("{path} is larger than {TEXT_LIMIT} bytes")));
    }
    let mut bytes = Vec::new();
    tree.reader(entry.bytes).read_to_end(&mut bytes).map_err(|e| store_failed(&e))?;
    let text = String::from_utf8(bytes);
    text.map(Some).map_err(|_| refused(ErrorKind::InvalidRequest, format!("{path} is not UTF-8")))
}

/// How bytes are compressed, by their first ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// They are not.
    None,
    /// gzip.
    Gzip,
    /// zstd.
    Zstd,
    /// In a way that is not understood here.
    Other(&'static str),
}

/// Tells the compression.
pub fn compression(first: &[u8]) -> Compression {
    match first {
        [0x1f, 0x8b, ..] => Compression::Gzip,
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Compression::Zstd,
        [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, ..] => Compression::Other("bzip2"),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Compression::Other("xz"),
        _ => Compression::None,
    }
}

/// Fills a buffer as far as there is something.
///
/// # Errors
/// Reading fails.
pub fn head(reader: &mut impl Read, most: usize) -> io::Result<Vec<u8>> {
    let mut head = Vec::with_capacity(most);
    reader.take(most as u64).read_to_end(&mut head)?;
    Ok(head)
}

fn decompress(mut spooled: File, dir: &Path, limit: u64) -> Result<File, Problem> {
    spooled.rewind().map_err(|e| store_failed(&e))?;
    let first = head(&mut spooled, 8).map_err(|e| store_failed(&e))?;
    spooled.rewind().map_err(|e| store_failed(&e))?;
    let reader = io::BufReader::with_capacity(256 << 10, &spooled);
    let bad = |e: &io::Error| refused(ErrorKind::InvalidRequest, format!("{NAME} cannot be decompressed: {e}"));
    let mut reader: Box<dyn Read + '_> = match compression(&first) {
        Compression::None => {
            drop(reader);
            return Ok(spooled);
        }
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(reader)),
        Compression::Zstd => Box::new(zstd::Decoder::with_buffer(reader).map_err(|e| bad(&e))?),
        Compression::Other(name) => {
            let text = format!("{NAME} is compressed with {name}: send it plain or with gzip or zstd");
            return Err(refused(ErrorKind::UnsupportedMediaType, text));
        }
    };
    let mut out = tempfile::tempfile_in(dir).map_err(|e| store_failed(&e))?;
    let mut buffer = vec![0; 256 << 10];
    let mut total = 0;
    loop {
        let n = reader.read(&mut buffer).map_err(|e| bad(&e))?;
        if n == 0 {
            break;
        }
        total += n as u64;
        if total > limit {
            return Err(refused(ErrorKind::TooLarge, format!("{NAME} expands to more than {limit} bytes")));
        }
        out.write_all(&buffer[..n]).map_err(|e| store_failed(&e))?;
    }
    Ok(out)
}
