//! What the holder hands to a server, and the server as a program.

use super::{Config, Core, Server, Source, guard};
use crate::control::{RestartCause, Restarts, Who};
use crate::fuse::wire::{HAS_RESEND, Offer};
use crate::holder::watch;
use crate::kept;
use crate::options::Options;
use corral_store::{StoreConfig, StoreError};
use corral_sys::process;
use rustix::io::{Errno, FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{RecvFlags, SendFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::{Mutex as Turn, oneshot};

/// Descriptors, in the order in which their numbers are told.
#[derive(Debug)]
pub struct Handed {
    /// The FUSE connection.
    pub device: OwnedFd,
    /// The control socket.
    pub listener: OwnedFd,
    /// A memory file: what was agreed with the kernel.
    pub state: OwnedFd,
    /// Holds the lock on the root.
    pub lock: OwnedFd,
    /// The program.
    pub program: OwnedFd,
    /// The connection to the holder.
    pub link: OwnedFd,
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum HandedError {
    /// Numbers that are not those of descriptors.
    #[error("descriptors {0:?} were not handed over")]
    Descriptors(String),
    /// The store's URL cannot be.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Something of the host.
    #[error("the server cannot start")]
    Io(#[from] io::Error),
}

impl Handed {
    /// Takes descriptors whose numbers are told, divided by commas.
    ///
    /// # Errors
    /// They are not there.
    pub fn take(numbers: &str) -> Result<Self, HandedError> {
        let refuse = || HandedError::Descriptors(numbers.to_owned());
        let mut numbers = numbers.split(',').map(|n| process::inherited(n.parse().ok()?).ok());
        let mut next = || numbers.next().flatten().ok_or_else(refuse);
        Ok(Self { device: next()?, listener: next()?, state: next()?, lock: next()?, program: next()?, link: next()? })
    }
}

/// Who this server is, and how it speaks with its holder.
#[derive(Debug, Default)]
pub(crate) struct Identity {
    holder_pid: i32,
    state: Option<File>,
    link: Option<Arc<OwnedFd>>,
    resends: AtomicBool,
    build: OnceLock<String>,
    turn: Turn<()>,
    answer: Mutex<Option<oneshot::Sender<Result<(), String>>>>,
}

impl Identity {
    fn of(state: File, link: Arc<OwnedFd>, holder_pid: i32) -> Self {
        let resends = kept::flags(&state) & HAS_RESEND != 0;
        Self { holder_pid, state: Some(state), link: Some(link), resends: resends.into(), ..Self::default() }
    }

    /// Keeps what was agreed with the kernel for the servers after this one, which are not asked.
    pub fn agree(&self, offer: &Offer) {
        self.resends.store(offer.flags & HAS_RESEND != 0, Ordering::Relaxed);
        if let Some(state) = &self.state
            && let Err(error) = kept::keep_flags(state, offer.flags)
        {
            tracing::warn!(%error, "what was agreed with the kernel cannot be kept");
        }
    }

    /// How many servers were replaced before this one.
    pub fn restarts(&self) -> Restarts {
        self.state.as_ref().map(kept::restarts).unwrap_or_default()
    }

    /// Why this one is in the place of another.
    pub fn replaces(&self) -> Option<RestartCause> {
        self.state.as_ref().and_then(kept::last_end)
    }

    pub fn tell(&self, root: &Path, epoch: u64) -> Who {
        let build = || -> io::Result<String> {
            let mut hasher = blake3::Hasher::new();
            hasher.update_reader(File::open("/proc/self/exe")?)?;
            Ok(hasher.finalize().to_string())
        };
        Who {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            build: self.build.get_or_init(|| build().unwrap_or_default()).clone(),
            server_pid: std::process::id() as i32,
            holder_pid: self.holder_pid,
            epoch,
            root: root.to_owned(),
            resends: self.resends.load(Ordering::Relaxed),
        }
    }

    /// Asks the holder whether it can go on as another program. When it can, it does so once [`Self::go`] was called.
    pub async fn upgrade(&self, program: &Path) -> Result<(), String> {
        const LONGEST: Duration = Duration::from_secs(10);
        let link = self.link.as_ref().ok_or("there is no holder")?;
        let _turn = self.turn.lock().await;
        let (tell, told) = oneshot::channel();
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(tell);
        let message = [b"upgrade ", program.as_os_str().as_encoded_bytes()].concat();
        rustix::net::send(link, &message, SendFlags::NOSIGNAL).map_err(|e| e.to_string())?;
        match tokio::time::timeout(LONGEST, told).await {
            Ok(Ok(answer)) => answer,
            _ => Err("the holder does not answer".to_owned()),
        }
    }

    /// The client knows: the holder may end this server.
    pub fn go(&self) {
        self.say(b"go");
    }

    /// Tells the holder, which does not wait long for it.
    fn say(&self, word: &[u8]) {
        if let Some(link) = &self.link {
            rustix::net::send(link, word, SendFlags::NOSIGNAL).unwrap_or(0);
        }
    }

    fn heard(&self, message: &[u8]) {
        let answer = match message.strip_prefix(b"no ") {
            None => Ok(()),
            Some(reason) => Err(String::from_utf8_lossy(reason).into_owned()),
        };
        if let Some(tell) = self.answer.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // It may have waited too long.
            tell.send(answer).unwrap_or(());
        }
    }
}

/// What it takes to become a holder.
struct Spare {
    device: OwnedFd,
    listener: OwnedFd,
    state: OwnedFd,
    lock: OwnedFd,
    program: OwnedFd,
    options: Options,
}

/// Serves until the file system is unmounted.
///
/// # Errors
/// It cannot start.
pub fn run(options: Options, handed: Handed, holder_pid: i32) -> Result<(), HandedError> {
    const OOM_SCORE: i32 = -900;
    guard::protect(OOM_SCORE);
    // Half a server would leave readers waiting: the holder starts a whole one.
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        std::process::abort();
    }));
    let store: StoreConfig = options.store.parse()?;
    let copy = |fd: &OwnedFd| fcntl_dupfd_cloexec(fd, 3).map_err(io::Error::from);
    let spare = Spare {
        device: copy(&handed.device)?,
        listener: copy(&handed.listener)?,
        state: copy(&handed.state)?,
        lock: handed.lock,
        program: handed.program,
        options: options.clone(),
    };
    let link = Arc::new(handed.link);
    let who = Identity::of(File::from(handed.state), Arc::clone(&link), holder_pid);
    let config: Config = options.server;
    let server = Server::start_as(config, Source::named(store), handed.device, who)?;
    server.listen(handed.listener.into())?;
    let core = Arc::clone(&server.core);
    std::thread::Builder::new().name("lazy-holder".to_owned()).spawn(move || {
        let mut message = [0; 4096];
        loop {
            match rustix::net::recv(&*link, &mut message[..], RecvFlags::empty()) {
                Ok((0, _)) => spare.take_over(),
                Ok((length, _)) => hear(&core, &message[..length]),
                Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the connection to the holder failed");
                    spare.take_over();
                }
            }
        }
    })?;
    server.wait();
    Ok(())
}

/// A word of the holder.
fn hear(core: &Arc<Core>, message: &[u8]) {
    if message != watch::QUESTION {
        return core.who.heard(message);
    }
    let asked = Arc::clone(core);
    // Answered by those who do the work.
    core.runtime.spawn(async move {
        if asked.is_well() {
            asked.who.say(watch::ANSWER);
        }
    });
}

impl Spare {
    /// The holder is gone: this process becomes the holder. Its server does what this one did.
    fn take_over(&self) -> ! {
        tracing::error!("the holder ended: going on in its place");
        let held = [&self.device, &self.listener, &self.state, &self.lock];
        let inheritable = held.iter().try_for_each(|fd| fcntl_setfd(fd, FdFlags::empty()));
        let numbers = held.map(|fd| fd.as_raw_fd().to_string()).join(",");
        let words = crate::holder::resume_words(&numbers, &self.options);
        let error = match inheritable {
            Ok(()) => crate::holder::execute(&self.program, &words),
            Err(error) => error,
        };
        tracing::error!(%error, "this is not possible: ending");
        std::process::abort();
    }
}

/// The path of the running program.
pub(crate) fn own_path() -> Option<PathBuf> {
    std::env::current_exe().ok()
}
