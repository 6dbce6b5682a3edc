//! `corral-keeper SOCKET INIT GUEST BUILD`: the keeper of a node's sandboxes. The node starts it; see the library's page.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, anyhow, bail};
use corral_keeper::filter::Filter;
use corral_keeper::kit::Kit;
use corral_keeper::server::Server;
use corral_keeper::terminals::Terminals;
use corral_keeper::{Hidden, Restored, Saved};
use corral_sys::fork::SingleThreaded;
use corral_sys::{identity, process};
use rustix::fs::{CWD, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

const USAGE: &str = "usage: corral-keeper SOCKET INIT GUEST BUILD
The node agent starts this program; it is of no use by hand.";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ended = match words.as_slice() {
        [_, "--resume", state, init, guest, build] => resume([*state, *init, *guest], build),
        [socket, init, guest, build] => begin(socket, init, guest, build),
        _ => {
            eprintln!("{USAGE}");
            std::process::exit(2);
        }
    };
    if let Err(error) = ended {
        eprintln!("corral-keeper: {error:#}");
        std::process::exit(1);
    }
}

fn begin(socket: &str, init: &str, guest: &str, build: &str) -> Result<()> {
    if !rustix::process::getuid().is_root() {
        bail!("it must run as root");
    }
    // Signals for the node's terminal or process group are not for the keeper.
    rustix::process::setsid().context("setsid")?;
    let own = Own::prepare()?;
    let init = sealed_copy(init).with_context(|| format!("cannot load {init}"))?;
    let guest = sealed_copy(guest).with_context(|| format!("cannot load {guest}"))?;
    let listener = listen(socket).with_context(|| format!("cannot listen on {socket}"))?;
    corral_keeper::enter_private_root().map_err(|(step, e)| anyhow!("cannot build a private root: {step}: {e}"))?;
    let kit = own.kit(init, guest, build, prepare_terminals())?;
    let signals = process::signal_fd(&[libc::SIGCHLD]).context("signalfd")?;
    Server::new(kit, listener, signals).context("epoll")?.run().context("the loop ended")
}

/// Goes on where another version of this program left off: in its process, root and namespaces, with its children.
fn resume(numbers: [&str; 3], build: &str) -> Result<()> {
    let own = Own::prepare()?;
    let mut inherited =
        numbers.into_iter().map(|number| -> Result<OwnedFd> { Ok(process::inherited(number.parse()?)?) });
    let mut next = || inherited.next().context("a descriptor is missing")?;
    let (state, init, guest) = (next()?, next()?, next()?);
    let saved: Saved = serde_json::from_slice(&std::fs::read(of_descriptor(&state))?).context("the state")?;
    let init = sealed_copy(&of_descriptor(&init)).context("cannot load the first process")?;
    let guest = sealed_copy(&of_descriptor(&guest)).context("cannot load the worker")?;
    let Restored { listener, table, terminals } = saved.restore().context("a descriptor of the state is missing")?;
    let kit = own.kit(init, guest, build, terminals.or_else(prepare_terminals))?;
    let signals = process::signal_fd(&[libc::SIGCHLD]).context("signalfd")?;
    Server::resume(kit, listener, signals, table).context("epoll")?.run().context("the loop ended")
}

fn of_descriptor(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// What the process itself must be before anything else.
struct Own {
    single: SingleThreaded,
    reserved: Vec<OwnedFd>,
    null: OwnedFd,
}

impl Own {
    fn prepare() -> Result<Self> {
        // One executed by its descriptor has a number for a name.
        rustix::thread::set_name(c"corral-keeper").context("its name")?;
        let single = SingleThreaded::observe().context("forking needs a single thread")?;
        process::set_not_dumpable().context("cannot become undumpable")?;
        identity::keep_capabilities_over_setuid(true).context("securebits")?;
        let reserved = reserve_low_numbers().context("/dev/null")?;
        let null =
            rustix::fs::openat(CWD, "/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).context("/dev/null")?;
        Ok(Self { single, reserved, null })
    }

    fn kit(self, init: OwnedFd, guest: OwnedFd, build: &str, terminals: Option<Terminals>) -> Result<Kit> {
        Ok(Kit {
            single: self.single,
            init,
            guest,
            filter: Filter::build()?,
            hidden: Hidden::observe(),
            build: build.to_owned(),
            terminals,
            null: self.null,
            _reserved: self.reserved,
        })
    }
}

fn prepare_terminals() -> Option<Terminals> {
    Terminals::prepare()
        .inspect_err(|e| eprintln!("corral-keeper: no automounter ({e}): every sandbox has a devpts from its start"))
        .ok()
}

/// Occupies the numbers that descriptors are placed at in children, so that nothing a child still needs has one of them.
fn reserve_low_numbers() -> Result<Vec<OwnedFd>> {
    let mut reserved = Vec::new();
    loop {
        let fd = rustix::fs::openat(CWD, "/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        if fd.as_raw_fd() > corral_keeper::CONTROL_FD {
            return Ok(reserved);
        }
        reserved.push(fd);
    }
}

/// A program in memory, sealed and unreadable, so that no sandbox can change or trace it.
fn sealed_copy(path: &str) -> Result<OwnedFd> {
    let bytes = std::fs::read(path)?;
    let memfd = rustix::fs::memfd_create("corral", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        let n = rustix::io::write(&memfd, rest)?;
        rest = &rest[n..];
    }
    rustix::fs::fchmod(&memfd, Mode::from_raw_mode(0o111))?;
    rustix::fs::fcntl_add_seals(&memfd, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(memfd)
}

/// Listens at `path`. The socket is named only once it listens: whoever sees the name may connect.
fn listen(path: &str) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let unnamed = Path::new(path).with_extension("new");
    if unnamed.exists() {
        std::fs::remove_file(&unnamed)?;
    }
    rustix::net::bind(&socket, &SocketAddrUnix::new(&unnamed)?)?;
    rustix::net::listen(&socket, 4)?;
    std::fs::rename(&unnamed, path)?;
    Ok(socket)
}
