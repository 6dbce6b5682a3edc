//! The node's side of the control socket.

mod process;

pub use process::{LazyProcess, ProcessError, end};

use crate::LayerId;
use crate::control::{After, Done, EventLine, Evicted, Listening, Opened, Refusal, Reply, Request, Stats, Who};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(30);
/// Bytes of the longest answer.
const MAX_ANSWER: u64 = 64 << 20;

/// Why a request was not answered as wished.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The connection failed: the server ended, or there is none. Connect anew.
    #[error("the connection to the lazy server failed")]
    Io(#[from] io::Error),
    /// It does not answer.
    #[error("the lazy server does not answer")]
    Timeout,
    /// It answers, but not so that it is understood.
    #[error("the answer of the lazy server is not understood: {0}")]
    Answer(#[from] serde_json::Error),
    /// It refuses.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// A connection to a server. It ends when the server does; what was asked may then have been done.
#[derive(Debug)]
pub struct LazyLink {
    reader: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
}

impl LazyLink {
    /// Connects.
    ///
    /// # Errors
    /// Nobody listens there.
    pub async fn connect(socket: &Path) -> Result<Self, LinkError> {
        let (reader, writer) =
            timeout(ANSWER, UnixStream::connect(socket)).await.map_err(|_| LinkError::Timeout)??.into_split();
        Ok(Self { reader: BufReader::new(reader), writer })
    }

    /// Says that a layer is about to be used by a task of this class.
    ///
    /// # Errors
    /// There is no such layer, no such class can be, or the connection fails.
    pub async fn open(&mut self, layer: LayerId, class: &str) -> Result<Opened, LinkError> {
        self.call(&Request::Open { layer, class: class.to_owned() }).await
    }

    /// Counters.
    ///
    /// # Errors
    /// The connection fails.
    pub async fn stats(&mut self) -> Result<Stats, LinkError> {
        self.call(&Request::Stats {}).await
    }

    /// Has the server and the kernel drop what they know of a layer, whose directory may then go.
    ///
    /// # Errors
    /// The kernel keeps the name, or the connection fails.
    pub async fn forget(&mut self, layer: LayerId) -> Result<(), LinkError> {
        self.call(&Request::Forget { layer }).await.map(|Done {}| ())
    }

    /// Has the server drop the data of a layer; says how many bytes of the disk it took. What is mounted reads on.
    ///
    /// # Errors
    /// There is no such layer, its files cannot be changed, or the connection fails.
    pub async fn evict(&mut self, layer: LayerId) -> Result<u64, LinkError> {
        self.call(&Request::Evict { layer }).await.map(|Evicted { freed_bytes }| freed_bytes)
    }

    /// Who answers.
    ///
    /// # Errors
    /// The connection fails.
    pub async fn who(&mut self) -> Result<Who, LinkError> {
        self.call(&Request::Who {}).await
    }

    /// Has holder and server go on as another program. The connection ends with the server that answers.
    ///
    /// # Errors
    /// That program will not do, or the connection fails.
    pub async fn upgrade(mut self, program: &Path) -> Result<(), LinkError> {
        self.call(&Request::Upgrade { program: program.to_owned() }).await.map(|Done {}| ())
    }

    /// What happens, from after an event on; from the oldest that is kept where none is named.
    ///
    /// # Errors
    /// The connection fails.
    pub async fn events(mut self, after: Option<After>) -> Result<Events, LinkError> {
        let Listening { epoch, gap } = self.call(&Request::Events { after }).await?;
        Ok(Events { link: self, epoch, gap })
    }

    async fn call<T: DeserializeOwned>(&mut self, request: &impl Serialize) -> Result<T, LinkError> {
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        let exchange = async {
            self.writer.write_all(&line).await?;
            self.line().await
        };
        match timeout(ANSWER, exchange).await.map_err(|_| LinkError::Timeout)?? {
            Reply::Ok(value) => Ok(value),
            Reply::Error(refusal) => Err(refusal.into()),
        }
    }

    async fn line<T: DeserializeOwned>(&mut self) -> Result<T, LinkError> {
        let mut line = Vec::new();
        (&mut self.reader).take(MAX_ANSWER).read_until(b'\n', &mut line).await?;
        if line.last() != Some(&b'\n') {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        Ok(serde_json::from_slice(&line)?)
    }
}

/// A stream of events. It ends when the server does; connect anew with the last number then.
#[derive(Debug)]
pub struct Events {
    link: LazyLink,
    /// Whose events these are.
    pub epoch: u64,
    /// Whether events of another server may be missing.
    pub gap: bool,
}

impl Events {
    /// Waits for the next one. Not to be dropped while it waits, if the stream is used after.
    ///
    /// # Errors
    /// The connection fails.
    pub async fn next(&mut self) -> Result<EventLine, LinkError> {
        self.link.line().await
    }
}
