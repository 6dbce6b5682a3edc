//! The process that holds the FUSE connection, so that the server may die.
//!
//! One thread that sleeps. It mounts, binds the control socket, starts the server and starts it again when it ends or
//! stands still ([`watch`]). It makes no decisions about layers and knows none. To go on as another version it executes that in its own process, with all
//! descriptors; readers notice nothing but the time it takes to start a server. When the holder itself is killed, the
//! server takes its place in the same way. When both are, a new holder goes on with what somebody else has kept
//! ([`crate::lifeline`]).
//!
//! `ROOT/lazy.lock` keeps a second holder away; it stays when the holder ends.

mod alive;
mod mount;
mod server;
mod upgrade;
pub(crate) mod watch;

use crate::control::RestartCause;
use crate::kept;
use crate::lifeline::{Lifeline, STATE};
use crate::options::Options;
use crate::server::protect;
use corral_sys::fork::{SingleThreaded, try_reap_any};
use corral_sys::process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, MemfdFlags, Mode, OFlags};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use server::Child;
use std::convert::Infallible;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use watch::{Look, QUESTION, Watch};

pub use alive::{is_held, is_lost, kill, processes};
pub use mount::{is_mounted, mount, unmount};
pub use upgrade::probe_line;

/// Why a holder does not hold.
#[derive(Debug, thiserror::Error)]
pub enum HolderError {
    /// Another one does, for the same root.
    #[error("another holder serves {}", .0.display())]
    Busy(PathBuf),
    /// The store's URL cannot be.
    #[error(transparent)]
    Store(#[from] corral_store::StoreError),
    /// It held until somebody else took the mount away, or the kernel ended the connection.
    #[error("{} is not mounted any more", .0.display())]
    Unmounted(PathBuf),
    /// Descriptors that were to be handed over are not there.
    #[error("descriptors {0:?} were not handed over")]
    Descriptors(String),
    /// What somebody kept of another holder cannot be had.
    #[error("descriptors cannot be copied from {0:?}")]
    Kept(String, #[source] io::Error),
    /// A call failed.
    #[error("{what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

fn failed(what: &'static str, path: &Path) -> impl Fn(Errno) -> HolderError {
    let path = path.to_owned();
    move |errno| HolderError::Io { what, path: path.clone(), source: errno.into() }
}

/// Descriptors that outlive every server, and every version of this program.
struct Held {
    device: OwnedFd,
    listener: OwnedFd,
    state: OwnedFd,
    lock: OwnedFd,
}

/// A holder at work.
struct Holder {
    options: Options,
    held: Held,
    program: OwnedFd,
    signals: OwnedFd,
    single: SingleThreaded,
    environment: Vec<CString>,
    child: Option<Child>,
    /// When to start the next server, where that is not now.
    pause: Option<Instant>,
    /// Servers in a row that ended as soon as they began.
    short: u32,
    watch: Watch,
    /// How the server before the next one ended, where it was not told to.
    after: Option<RestartCause>,
    /// Whether a server has found the connection ended.
    is_over: bool,
}

/// Name of the lock in the root.
const LOCK: &str = "lazy.lock";
const OOM_SCORE: i32 = -1000;
/// A server that ends sooner is not started again at once for ever.
const SHORT: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long a killed server may take to be gone.
const GONE_WITHIN: Duration = Duration::from_secs(10);

/// Mounts, serves until it is told to end, and leaves nothing behind.
///
/// # Errors
/// It cannot begin.
pub fn hold(options: Options) -> Result<(), HolderError> {
    let root = &options.server.root;
    let lock = begin(&options)?;
    let device = mount(root)?;
    let state = rustix::fs::memfd_create(STATE, MemfdFlags::CLOEXEC).map_err(failed("memory for", root));
    match state.and_then(|state| Holder::at_socket(options.clone(), Lifeline { device, state }, lock)) {
        Ok(holder) => holder.run(),
        Err(error) => {
            unmount(root);
            Err(error)
        }
    }
}

/// Goes on with what somebody has kept of a holder that is gone, where a word says. Its readers have been waiting.
///
/// # Errors
/// What it needs is not there. The mount stays as it is.
pub fn go_on(options: Options, word: &str) -> Result<(), HolderError> {
    let lock = begin(&options)?;
    let kept = Lifeline::from_word(word).map_err(|errno| HolderError::Kept(word.to_owned(), errno.into()))?;
    let mut holder = Holder::at_socket(options, kept, lock)?;
    holder.after = Some(RestartCause::Crashed);
    holder.run()
}

/// What any holder that is started begins with; gives the lock on the root.
fn begin(options: &Options) -> Result<OwnedFd, HolderError> {
    // Known before anything is touched.
    options.store.parse::<corral_store::StoreConfig>()?;
    // Signals for the terminal or group of whoever starts it are not for it. It may lead a group already.
    rustix::process::setsid().map(|_| ()).unwrap_or(());
    lock(&options.server.root)
}

/// Goes on where another version of this program left off.
///
/// # Errors
/// What it needs is not there.
pub fn resume(options: Options, numbers: &str) -> Result<(), HolderError> {
    let refuse = || HolderError::Descriptors(numbers.to_owned());
    let mut fds = numbers.split(',').map(|n| process::inherited(n.parse().ok()?).ok());
    let mut next = || fds.next().flatten().ok_or_else(refuse);
    let held = Held { device: next()?, listener: next()?, state: next()?, lock: next()? };
    Holder::new(options, held)?.run()
}

/// What is told to a program that takes over these descriptors.
pub(crate) fn resume_words(numbers: &str, options: &Options) -> Vec<String> {
    let words = ["corral-lazy", "hold", "--resume", numbers].map(str::to_owned);
    words.into_iter().chain(options.words()).collect()
}

/// Executes a program in this process. Returns only when that fails.
pub(crate) fn execute(program: &OwnedFd, words: &[String]) -> Errno {
    let words: Result<Vec<CString>, _> = words.iter().map(|word| CString::new(word.as_str())).collect();
    match words {
        Ok(words) => process::exec_fd(std::os::fd::AsFd::as_fd(program), &words, &environment()),
        Err(_) => Errno::INVAL,
    }
}

fn environment() -> Vec<CString> {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok()
    };
    std::env::vars_os().filter_map(text).collect()
}

impl Holder {
    /// One that listens at its socket from now on.
    fn at_socket(options: Options, Lifeline { device, state }: Lifeline, lock: OwnedFd) -> Result<Self, HolderError> {
        let socket = options.socket.clone();
        let listener = listen(&socket)?;
        // From here on the socket is its own.
        Self::new(options, Held { device, listener, state, lock })
            .inspect_err(|_| rustix::fs::unlink(&socket).unwrap_or(()))
    }

    fn new(options: Options, held: Held) -> Result<Self, HolderError> {
        let own = Path::new("/proc/self/exe");
        // One executed by its descriptor has a number for a name.
        rustix::thread::set_name(c"corral-lazy").map_err(failed("name", own))?;
        protect(OOM_SCORE);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let program = rustix::fs::open(own, flags, Mode::empty()).map_err(failed("open", own))?;
        let single = SingleThreaded::observe().map_err(|source| HolderError::Io {
            what: "look at the threads of",
            path: own.to_owned(),
            source,
        })?;
        let signals = process::signal_fd(&[libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGHUP]);
        let signals = signals.map_err(failed("watch the signals of", own))?;
        let mut environment = environment();
        // What a server frees it uses again: with an arena for each of many threads it would keep several times as much.
        environment.retain(|entry| !entry.as_bytes().starts_with(b"MALLOC_ARENA_MAX="));
        environment.push(c"MALLOC_ARENA_MAX=4".to_owned());
        Ok(Self {
            watch: Watch::new(options.still),
            options,
            held,
            program,
            signals,
            single,
            environment,
            child: None,
            pause: None,
            short: 0,
            after: None,
            is_over: false,
        })
    }

    fn run(mut self) -> Result<(), HolderError> {
        self.start();
        loop {
            let (signalled, spoken) = self.wait();
            if spoken {
                self.hear();
            }
            if signalled {
                for signal in read_signals(&self.signals) {
                    match signal {
                        libc::SIGTERM | libc::SIGINT => return self.end(),
                        libc::SIGHUP => {
                            let Err(why) = self.upgrade(None);
                            eprintln!("corral-lazy: staying as it is: {why}");
                        }
                        _ => self.reap(),
                    }
                }
            }
            if self.is_over {
                let root = self.options.server.root.clone();
                return self.end().and(Err(HolderError::Unmounted(root)));
            }
            self.look();
            if self.child.is_none() && self.pause.is_none_or(|at| at <= Instant::now()) {
                self.start();
            }
        }
    }

    /// Waits for a signal, a word of the server, or the time to start or ask one.
    fn wait(&self) -> (bool, bool) {
        let due = if self.child.is_some() { self.watch.due() } else { self.pause };
        let timeout = due.map(|at| {
            let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        let link = self.child.as_ref().map(|child| &child.link);
        let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
        fds.extend(link.map(|link| PollFd::new(link, PollFlags::IN)));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {
                let ready = |n: usize| fds.get(n).is_some_and(|fd| !fd.revents().is_empty());
                (ready(0), ready(1))
            }
            Err(_) => (false, false),
        }
    }

    fn start(&mut self) {
        self.pause = None;
        if let Err(error) = kept::note_end(&self.held.state, self.after.take()) {
            eprintln!("corral-lazy: how the last server ended cannot be kept: {error}");
        }
        match Child::start(self) {
            Ok(child) => {
                self.watch.begin(Instant::now());
                self.child = Some(child);
            }
            Err(error) => {
                eprintln!("corral-lazy: the server cannot be started: {error}");
                self.pause = Some(Instant::now() + LONGEST_PAUSE);
            }
        }
    }

    fn reap(&mut self) {
        while let Ok(Some(ended)) = try_reap_any() {
            let Some(child) = self.child.take_if(|child| child.pid == ended.pid) else { continue };
            eprintln!("corral-lazy: server {} ended ({:?}, {:?})", child.pid, ended.code, ended.signal);
            self.is_over = ended.code == Some(0);
            self.after.get_or_insert(RestartCause::Crashed);
            self.short = if child.started.elapsed() < SHORT { self.short + 1 } else { 0 };
            // The first few at once: what ended them may have passed.
            let pause = match self.short {
                0..4 => Duration::ZERO,
                more => Duration::from_millis(20 << (more - 4).min(6)).min(LONGEST_PAUSE),
            };
            self.pause = Some(Instant::now() + pause);
        }
    }

    /// Asks the server, and kills one that does not answer; the signal of its end says the rest.
    fn look(&mut self) {
        let Some(child) = &self.child else { return };
        match self.watch.look(Instant::now()) {
            Look::Rest => {}
            Look::Ask => self.tell(QUESTION),
            Look::Still => {
                eprintln!("corral-lazy: server {} stands still: it is killed", child.pid);
                // One that ended just now needs no signal.
                process::kill(child.pid, libc::SIGKILL).unwrap_or(());
                self.after = Some(RestartCause::Still);
                self.watch.begin(Instant::now());
            }
        }
    }

    /// Ends the server and waits until it is gone.
    fn stop(&mut self) {
        let Some(child) = self.child.take() else { return };
        let until = Instant::now() + GONE_WITHIN;
        process::kill(child.pid, libc::SIGKILL).unwrap_or(());
        while Instant::now() < until {
            match try_reap_any() {
                Ok(Some(ended)) if ended.pid == child.pid => return,
                Ok(Some(_)) => {}
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        eprintln!("corral-lazy: server {} does not end", child.pid);
    }

    fn end(mut self) -> Result<(), HolderError> {
        self.stop();
        unmount(&self.options.server.root);
        let socket = &self.options.socket;
        rustix::fs::unlink(socket).map_err(failed("remove", socket))
    }

    /// Makes descriptors survive an exec, or not.
    fn set_inheritable(&self, inheritable: bool) -> Result<(), Errno> {
        let flags = if inheritable { FdFlags::empty() } else { FdFlags::CLOEXEC };
        self.held.all().iter().try_for_each(|fd| fcntl_setfd(fd, flags))
    }

    /// Ends the server and executes another program. Returns only when that fails, with a new server at work.
    fn become_program(&mut self, program: &OwnedFd, path: PathBuf) -> Result<Infallible, String> {
        self.stop();
        let before = self.options.program.replace(path);
        let numbers = self.held.all().map(|fd| fd.as_raw_fd().to_string()).join(",");
        let words = resume_words(&numbers, &self.options);
        let error = self.set_inheritable(true).err().unwrap_or_else(|| execute(program, &words));
        // What cannot be set back closes in every child nevertheless.
        self.set_inheritable(false).unwrap_or(());
        self.options.program = before;
        self.after = None;
        self.start();
        Err(format!("it cannot be executed: {error}"))
    }
}

impl Held {
    fn all(&self) -> [&OwnedFd; 4] {
        [&self.device, &self.listener, &self.state, &self.lock]
    }
}

fn lock(root: &Path) -> Result<OwnedFd, HolderError> {
    let path = root.join(LOCK);
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let lock = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600)).map_err(failed("open", &path))?;
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock),
        Err(Errno::WOULDBLOCK) => Err(HolderError::Busy(root.to_owned())),
        Err(error) => Err(failed("lock", &path)(error)),
    }
}

fn listen(path: &Path) -> Result<OwnedFd, HolderError> {
    let socket = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
    };
    let address = SocketAddrUnix::new(path).map_err(failed("listen at", path))?;
    let listener = socket().map_err(failed("listen at", path))?;
    // Nobody else may connect, from the first moment.
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let mut bound = rustix::net::bind(&listener, &address);
    if bound == Err(Errno::ADDRINUSE)
        && let Ok(Err(Errno::CONNREFUSED)) = socket().map(|probe| rustix::net::connect(&probe, &address))
    {
        // Of a holder that died.
        bound = rustix::fs::unlink(path).and_then(|()| rustix::net::bind(&listener, &address));
    }
    rustix::process::umask(before);
    bound.and_then(|()| rustix::net::listen(&listener, 64)).map_err(failed("listen at", path))?;
    Ok(listener)
}

fn read_signals(signals: &OwnedFd) -> Vec<i32> {
    // `struct signalfd_siginfo` begins with the number.
    let mut infos = [0; 128 * 8];
    let length = rustix::io::read(signals, &mut infos).unwrap_or(0);
    infos[..length].chunks_exact(128).map(|info| i32::from_ne_bytes([info[0], info[1], info[2], info[3]])).collect()
}
