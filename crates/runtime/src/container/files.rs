//! File operations: a worker is started for each, and what it says is treated as hostile.

use super::Containers;
use crate::RuntimeError;
use crate::keeper_link::KeeperLink;
use crate::users::User;
use bytes::{Bytes, BytesMut};
use corral_api::files::{FileStatus, WatchEvent};
use corral_api::ids::SandboxId;
use corral_guest::protocol::{Kind, MAX_ENTRIES, MAX_PAYLOAD, Op, Outcome, WireStatus, decode_watch, parse_header};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// How long a worker may say nothing in the middle of an answer: storage of a throttled sandbox is slow, a worker whose
/// sandbox ended is silent for ever only when it cannot die.
const SILENCE: Duration = Duration::from_secs(120);

/// A worker, its operation sent.
#[derive(Debug)]
pub struct FileWorker {
    socket: UnixStream,
}

impl Containers {
    /// Starts a worker as this user and sends it its operation.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn begin(
        &self,
        keeper: &KeeperLink,
        sandbox: &SandboxId,
        user: &User,
        op: &Op,
    ) -> Result<FileWorker, RuntimeError> {
        let socket = self.start_worker(keeper, sandbox, user).await?;
        let mut worker = FileWorker { socket };
        let request = postcard::to_stdvec(op).map_err(|_| RuntimeError::Worker("the request cannot be sent"))?;
        worker.send(Kind::Request, &request).await?;
        Ok(worker)
    }

    /// An operation that is answered by a status or nothing.
    ///
    /// # Errors
    /// Those of the operation.
    pub async fn file_op(
        &self,
        keeper: &KeeperLink,
        sandbox: &SandboxId,
        user: &User,
        op: &Op,
    ) -> Result<Option<FileStatus>, RuntimeError> {
        self.begin(keeper, sandbox, user, op).await?.result().await
    }
}

impl FileWorker {
    async fn send(&mut self, kind: Kind, payload: &[u8]) -> Result<(), RuntimeError> {
        let lost = |_| RuntimeError::Worker("it is gone");
        let mut header = [kind as u8, 0, 0, 0, 0];
        header[1..].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        self.socket.write_all(&header).await.map_err(lost)?;
        self.socket.write_all(payload).await.map_err(lost)
    }

    async fn receive(&mut self) -> Result<(Kind, Bytes), RuntimeError> {
        let mut header = [0u8; 5];
        self.read_exact(&mut header).await?;
        let (kind, length) = parse_header(header).map_err(|_| RuntimeError::Worker("it sent nonsense"))?;
        let mut payload = BytesMut::zeroed(length);
        self.read_exact(&mut payload).await?;
        Ok((kind, payload.freeze()))
    }

    async fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), RuntimeError> {
        match tokio::time::timeout(SILENCE, self.socket.read_exact(buffer)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(RuntimeError::Worker("it is gone")),
            Err(_) => Err(RuntimeError::Worker("it is silent")),
        }
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// Those of the operation.
    pub async fn result(&mut self) -> Result<Option<FileStatus>, RuntimeError> {
        match self.receive().await? {
            (Kind::Result, bytes) => {
                let outcome: Outcome =
                    postcard::from_bytes(&bytes).map_err(|_| RuntimeError::Worker("it sent nonsense"))?;
                outcome.map(|s| s.map(FileStatus::from)).map_err(RuntimeError::File)
            }
            _ => Err(RuntimeError::Worker("it sent nonsense")),
        }
    }

    /// The next bytes of a read or archive; nothing at the end.
    ///
    /// # Errors
    /// When the worker broke off.
    pub async fn data(&mut self) -> Result<Option<Bytes>, RuntimeError> {
        match self.receive().await? {
            (Kind::Data, bytes) => Ok(Some(bytes)),
            (Kind::End, _) => Ok(None),
            (Kind::Result, bytes) => match postcard::from_bytes::<Outcome>(&bytes) {
                Ok(Err(error)) => Err(RuntimeError::File(error)),
                _ => Err(RuntimeError::Worker("it sent nonsense")),
            },
            _ => Err(RuntimeError::Worker("it sent nonsense")),
        }
    }

    /// Sends bytes of a write or archive. A worker that has failed already says why in its result.
    ///
    /// # Errors
    /// When the worker is gone.
    pub async fn put(&mut self, bytes: &[u8]) -> Result<(), RuntimeError> {
        for piece in bytes.chunks(MAX_PAYLOAD) {
            self.send(Kind::Data, piece).await?;
        }
        Ok(())
    }

    /// Says that the bytes are complete.
    ///
    /// # Errors
    /// When the worker is gone.
    pub async fn finish(&mut self) -> Result<(), RuntimeError> {
        self.send(Kind::End, &[]).await
    }

    /// Entries of a list, and whether there were more.
    ///
    /// # Errors
    /// Those of the operation.
    pub async fn entries(&mut self) -> Result<(Vec<FileStatus>, bool), RuntimeError> {
        let nonsense = RuntimeError::Worker("it sent nonsense");
        self.result().await?;
        let mut entries = Vec::new();
        loop {
            match self.receive().await? {
                (Kind::Entries, bytes) if entries.len() < MAX_ENTRIES as usize => {
                    let Ok(status) = postcard::from_bytes::<WireStatus>(&bytes) else { return Err(nonsense) };
                    entries.push(status.into());
                }
                (Kind::End, bytes) => return Ok((entries, bytes.first() == Some(&1))),
                _ => return Err(nonsense),
            }
        }
    }

    /// The next change seen by a watch; nothing when it ended.
    ///
    /// # Errors
    /// Those of the operation.
    pub async fn change(&mut self) -> Result<Option<WatchEvent>, RuntimeError> {
        // A watch may be silent for as long as nothing changes.
        if self.socket.readable().await.is_err() {
            return Ok(None);
        }
        match self.receive().await {
            Ok((Kind::Watch, bytes)) => decode_watch(&bytes).map(Some).ok_or(RuntimeError::Worker("it sent nonsense")),
            Ok((Kind::Result, bytes)) => match postcard::from_bytes::<Outcome>(&bytes) {
                Ok(Ok(_)) => Ok(None),
                Ok(Err(error)) => Err(RuntimeError::File(error)),
                Err(_) => Err(RuntimeError::Worker("it sent nonsense")),
            },
            Ok(_) => Err(RuntimeError::Worker("it sent nonsense")),
            Err(RuntimeError::Worker("it is gone")) => Ok(None),
            Err(other) => Err(other),
        }
    }
}
