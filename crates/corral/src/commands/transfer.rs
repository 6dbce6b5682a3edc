//! Uploads of files, standard input and directories (as tar), and downloads, as streams of bounded memory.

use super::pack::{Choice, LeftOut, Whole, pack};
use anyhow::Context as _;
use bytes::Bytes;
use futures_util::TryStreamExt as _;
use reqwest::{Body, Response};
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::mpsc;
use tokio_util::io::ReaderStream;

/// Pieces of a tar stream that may wait to be sent.
const PIECES: usize = 8;
const PIECE_BYTES: usize = 128 << 10;

/// A local source of bytes and, where known, their number.
pub struct Upload {
    /// The bytes.
    pub body: Body,
    /// How many.
    pub length: Option<u64>,
    /// What becomes of reading them.
    pub source: Source,
}

/// How reading an upload's bytes went, which the request that carries them does not tell: to it they only break off.
/// Clones are the same source.
#[derive(Debug, Clone, Default)]
pub struct Source(Arc<Mutex<Reading>>);

#[derive(Debug, Default)]
struct Reading {
    failed: Option<anyhow::Error>,
    left_out: LeftOut,
}

impl Source {
    fn reading(&self) -> MutexGuard<'_, Reading> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The outcome of the request: where the bytes could not be read, that, whatever it looked like to the server.
    ///
    /// # Errors
    /// The request failed, or reading did.
    pub fn settle<T>(&self, outcome: anyhow::Result<T>) -> anyhow::Result<T> {
        let mut reading = self.reading();
        if let Some(failed) = reading.failed.take() {
            return Err(failed);
        }
        let done = outcome?;
        reading.left_out.tell();
        Ok(done)
    }
}

impl Upload {
    /// A file.
    ///
    /// # Errors
    /// It cannot be opened.
    pub async fn file(path: &Path) -> anyhow::Result<Self> {
        let open = async {
            let file = tokio::fs::File::open(path).await?;
            let kind = file.metadata().await?;
            // What the kernel makes up has no length before it is read; neither has a pipe.
            let is_plain = kind.is_file() && kind.len() > 0;
            Ok::<_, io::Error>((file.into_std().await, is_plain))
        };
        let (mut file, is_plain) = open.await.with_context(|| format!("cannot open {}", path.display()))?;
        let unread = format!("cannot read {}", path.display());
        if !is_plain {
            return Ok(Self::written(move |pipe, _| io::copy(&mut file, pipe).map(drop).context(unread)));
        }
        let mut whole = Whole::of(file).with_context(|| unread.clone())?;
        let length = Some(whole.len());
        let upload = Self::written(move |pipe, _| io::copy(&mut whole, pipe).map(drop).context(unread));
        Ok(Self { length, ..upload })
    }

    /// Standard input.
    pub fn stdin() -> Self {
        let source = Source::default();
        let kept = source.clone();
        let stream = ReaderStream::with_capacity(tokio::io::stdin(), PIECE_BYTES).inspect_err(move |error| {
            kept.reading().failed = Some(anyhow::anyhow!("cannot read standard input: {error}"));
        });
        Self { body: Body::wrap_stream(stream), length: None, source }
    }

    /// A directory's content as a tar stream. Links are kept, ownership is as on disk.
    pub fn directory(path: PathBuf) -> Self {
        Self::written(move |pipe, left_out| pack(&path, pipe, |_, _| Choice::ALL, |socket| left_out.add(socket)))
    }

    /// What blocking work writes. It notes what it leaves out.
    pub fn written(work: impl FnOnce(&mut Pipe, &mut LeftOut) -> anyhow::Result<()> + Send + 'static) -> Self {
        let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(PIECES);
        let source = Source::default();
        let kept = source.clone();
        tokio::task::spawn_blocking(move || {
            let mut pipe = Pipe { sender: sender.clone(), held: Vec::with_capacity(PIECE_BYTES), ended: false };
            let mut left_out = LeftOut::sockets();
            let worked = work(&mut pipe, &mut left_out);
            // Noted before the stream ends in either way, as the outcome is asked for right after.
            kept.reading().left_out = left_out;
            match worked {
                Ok(()) => pipe.flush().unwrap_or(()),
                // Whoever took the bytes has had enough and says why.
                Err(_) if pipe.ended => {}
                Err(error) => {
                    kept.reading().failed = Some(error);
                    // A broken body makes the request fail; the receiver may be gone already.
                    drop(sender.blocking_send(Err(io::ErrorKind::UnexpectedEof.into())));
                }
            }
        });
        let stream = futures_util::stream::unfold(receiver, |mut receiver| async move {
            receiver.recv().await.map(|piece| (piece, receiver))
        });
        Self { body: Body::wrap_stream(stream), length: None, source }
    }

    /// The bytes of this source: `-`, a file or a directory.
    ///
    /// # Errors
    /// There is no such file.
    pub async fn of(source: &str) -> anyhow::Result<Self> {
        if source == "-" {
            return Ok(Self::stdin());
        }
        let path = Path::new(source);
        let kind = tokio::fs::metadata(path).await.with_context(|| format!("cannot read {source}"))?;
        if kind.is_dir() { Ok(Self::directory(path.to_owned())) } else { Self::file(path).await }
    }
}

/// Writes an answer's bytes to a file whose name appears with the whole content only.
///
/// # Errors
/// The answer breaks off, or the file cannot be written.
pub async fn save(mut response: Response, to: &Path, mode: Option<u32>) -> anyhow::Result<()> {
    let wrote = || format!("cannot write {}", to.display());
    // A link stays a link, and what is no file takes the bytes as they come.
    let followed = std::fs::canonicalize(to).unwrap_or_else(|_| to.to_owned());
    let to = followed.as_path();
    if to.metadata().is_ok_and(|found| !found.is_file()) {
        let mut file = tokio::fs::OpenOptions::new().write(true).open(to).await.with_context(wrote)?;
        while let Some(chunk) = response.chunk().await.context("the answer broke off")? {
            file.write_all(&chunk).await.with_context(wrote)?;
        }
        return file.flush().await.with_context(wrote);
    }
    let parent = to.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let usual = Permissions::from_mode(0o666);
    let part =
        tempfile::Builder::new().prefix(".corral-").permissions(usual).tempfile_in(parent).with_context(wrote)?;
    let mut file = tokio::fs::File::from_std(part.reopen().with_context(wrote)?);
    while let Some(chunk) = response.chunk().await.context("the answer broke off")? {
        file.write_all(&chunk).await.with_context(wrote)?;
    }
    file.flush().await.with_context(wrote)?;
    if let Some(mode) = mode {
        file.set_permissions(Permissions::from_mode(mode)).await.with_context(wrote)?;
    }
    part.persist(to).map(drop).with_context(wrote)
}

/// Writes an answer's bytes to standard output.
///
/// # Errors
/// The answer breaks off, or standard output is closed.
pub async fn print(mut response: Response) -> anyhow::Result<()> {
    while let Some(chunk) = response.chunk().await.context("the answer broke off")? {
        io::stdout().lock().write_all(&chunk).context("cannot write to standard output")?;
    }
    io::stdout().lock().flush().context("cannot write to standard output")
}

/// A writer that hands pieces to a request body and waits while it is behind.
pub struct Pipe {
    sender: mpsc::Sender<io::Result<Bytes>>,
    held: Vec<u8>,
    /// Nobody takes any more.
    ended: bool,
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.held.extend_from_slice(bytes);
        if self.held.len() >= PIECE_BYTES {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.held, Vec::with_capacity(PIECE_BYTES));
        self.sender.blocking_send(Ok(piece.into())).map_err(|_| {
            self.ended = true;
            io::Error::new(io::ErrorKind::BrokenPipe, "the request ended")
        })
    }
}
