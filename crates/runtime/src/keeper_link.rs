//! The node's connection to one keeper.

use crate::RuntimeError;
use corral_keeper::protocol::{Call, CommandNotice, MAX_MESSAGE, Message, Reply, Request, SandboxNotice, VERSION};
use corral_keeper::wire::{self, ReceiveError};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

/// What a keeper tells unasked.
#[derive(Debug)]
pub enum Notice {
    /// A sandbox it holds, or that ended.
    Sandbox(SandboxNotice),
    /// A command it holds, or that wrote or ended.
    Command(CommandNotice),
    /// The connection broke; nothing more comes.
    Lost,
}

type Waiting = HashMap<u64, oneshot::Sender<(Reply, Option<OwnedFd>)>>;

/// A connection. Dropping it closes it; the keeper goes on.
#[derive(Debug)]
pub struct KeeperLink {
    socket: Arc<AsyncFd<OwnedFd>>,
    waiting: Arc<Mutex<Option<Waiting>>>,
    next: AtomicU64,
    sending: tokio::sync::Mutex<()>,
    reader: tokio::task::JoinHandle<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl KeeperLink {
    /// Connects and greets. `hear` is given every notice and tells whether more are wanted; everything the keeper holds
    /// was given to it when this returns.
    ///
    /// # Errors
    /// When nobody listens, or the keeper speaks another version.
    pub async fn connect(
        path: &Path,
        hear: impl Fn(Notice) -> bool + Send + Sync + 'static,
    ) -> Result<Self, RuntimeError> {
        let link = Self::open(path, hear)?;
        match link.call(Request::Hello { version: VERSION }, &[]).await?.0 {
            Reply::Hello { version: VERSION } => Ok(link),
            Reply::Refused { reason } => Err(RuntimeError::Refused(reason)),
            _ => Err(RuntimeError::KeeperLost),
        }
    }

    /// Connects without a greeting: nothing is told before one.
    ///
    /// # Errors
    /// When nobody listens.
    pub fn open(path: &Path, hear: impl Fn(Notice) -> bool + Send + Sync + 'static) -> Result<Self, RuntimeError> {
        let failed = |e: Errno| RuntimeError::host("connect to the keeper at", path, e);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(failed)?;
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        rustix::net::connect(&socket, &address).map_err(failed)?;
        #[expect(deprecated, reason = "its successor is unsafe; an OwnedFd keeps the promise that one asks for")]
        let socket = AsyncFd::new(socket).map_err(|e| RuntimeError::host("wait for", path, e))?;
        let socket = Arc::new(socket);
        let waiting = Arc::new(Mutex::new(Some(Waiting::new())));
        let reader = tokio::spawn(read_all(socket.clone(), waiting.clone(), hear));
        Ok(Self { socket, waiting, next: AtomicU64::new(1), sending: tokio::sync::Mutex::new(()), reader })
    }

    /// Version of the protocol that the keeper speaks, and which programs it was started with.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn who(&self) -> Result<(u32, String), RuntimeError> {
        match self.call(Request::Who, &[]).await?.0 {
            Reply::Keeper { version, build } => Ok((version, build)),
            _ => Err(RuntimeError::KeeperLost),
        }
    }

    /// Sends a request with descriptors and waits for its reply.
    ///
    /// # Errors
    /// When the connection breaks. A request may have been carried out then: ask again under the same id.
    pub async fn call(
        &self,
        request: Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Option<OwnedFd>), RuntimeError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let bytes = postcard::to_stdvec(&Call { number, request }).map_err(|_| RuntimeError::Gone)?;
        if bytes.len() > MAX_MESSAGE {
            return Err(RuntimeError::ProgramTooLong(bytes.len()));
        }
        let (answer, wait) = oneshot::channel();
        lock(&self.waiting).as_mut().ok_or(RuntimeError::KeeperLost)?.insert(number, answer);
        let sent = self.send(&bytes, fds).await;
        if sent.is_err() {
            if let Some(waiting) = lock(&self.waiting).as_mut() {
                waiting.remove(&number);
            }
            return Err(RuntimeError::KeeperLost);
        }
        wait.await.map_err(|_| RuntimeError::KeeperLost)
    }

    async fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let _one = self.sending.lock().await;
        loop {
            match wire::send(self.socket.get_ref().as_fd(), bytes, fds) {
                Err(Errno::AGAIN) => {
                    let mut ready = self.socket.writable().await.map_err(|_| Errno::IO)?;
                    ready.clear_ready();
                }
                other => return other,
            }
        }
    }

    /// As [`Self::call`], for requests whose answer is `Done`.
    ///
    /// # Errors
    /// As `call`, and when the keeper knows no such thing or refuses.
    pub async fn ask(&self, request: Request) -> Result<Option<OwnedFd>, RuntimeError> {
        match self.call(request, &[]).await? {
            (Reply::Done, fd) => Ok(fd),
            (Reply::Unknown, _) => Err(RuntimeError::Gone),
            (Reply::Refused { reason }, _) => Err(RuntimeError::Refused(reason)),
            (Reply::Failed { step, errno }, _) => Err(RuntimeError::Start { step, errno }),
            _ => Err(RuntimeError::KeeperLost),
        }
    }

    /// Process id of the keeper.
    pub fn peer(&self) -> Option<i32> {
        rustix::net::sockopt::socket_peercred(self.socket.get_ref()).ok().map(|peer| peer.pid.as_raw_nonzero().get())
    }

    /// Waits until the keeper's process is gone.
    pub async fn peer_gone(&self) {
        let Some(pid) = self.peer() else { return };
        let path = std::path::PathBuf::from(format!("/proc/{pid}"));
        while path.exists() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    /// Whether the connection stands.
    pub fn is_connected(&self) -> bool {
        lock(&self.waiting).is_some()
    }
}

impl Drop for KeeperLink {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

async fn read_all(
    socket: Arc<AsyncFd<OwnedFd>>,
    waiting: Arc<Mutex<Option<Waiting>>>,
    hear: impl Fn(Notice) -> bool + Send + Sync,
) {
    let mut buffer = vec![0; MAX_MESSAGE];
    'connected: loop {
        let Ok(mut ready) = socket.readable().await else { break };
        loop {
            let received = match wire::receive(socket.get_ref().as_fd(), &mut buffer) {
                Ok(received) => received,
                Err(ReceiveError::WouldBlock) => break,
                Err(_) => break 'connected,
            };
            let message = match postcard::from_bytes(&received.bytes) {
                Ok(message) => message,
                Err(error) => {
                    tracing::error!(%error, "a keeper sent a message that cannot be read");
                    break 'connected;
                }
            };
            let told = match message {
                Message::Reply { number, reply } => {
                    let waiter = lock(&waiting).as_mut().and_then(|w| w.remove(&number));
                    if let Some(waiter) = waiter {
                        // Who asked may have gone away.
                        waiter.send((reply, received.fds.into_iter().next())).unwrap_or(());
                    }
                    true
                }
                Message::Sandbox(notice) => hear(Notice::Sandbox(notice)),
                Message::Command(notice) => hear(Notice::Command(notice)),
            };
            if !told {
                break 'connected;
            }
        }
        ready.clear_ready();
    }
    // Dropping the senders wakes everyone who waits.
    lock(&waiting).take();
    hear(Notice::Lost);
}
