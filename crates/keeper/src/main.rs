//! `corral-keeper SOCKET INIT GUEST`: the keeper of a node's sandboxes. The node starts it; see the library's page.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, anyhow, bail};
use corral_keeper::filter::Filter;
use corral_keeper::kit::Kit;
use corral_keeper::server::Server;
use corral_keeper::terminals::Terminals;
use corral_sys::fork::SingleThreaded;
use corral_sys::{identity, process};
use rustix::fs::{CWD, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsRawFd, OwnedFd};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let [Some(socket), Some(init), Some(guest), None] = std::array::from_fn(|_| arguments.next()) else {
        eprintln!(
            "usage: corral-keeper SOCKET INIT GUEST\nThe node agent starts this program; it is of no use by hand."
        );
        std::process::exit(2);
    };
    if let Err(error) = run(&socket, &init, &guest) {
        eprintln!("corral-keeper: {error:#}");
        std::process::exit(1);
    }
}

fn run(socket: &str, init: &str, guest: &str) -> Result<()> {
    if !rustix::process::getuid().is_root() {
        bail!("it must run as root");
    }
    // Signals for the node's terminal or process group are not for the keeper.
    rustix::process::setsid().context("setsid")?;
    let single = SingleThreaded::observe().context("forking needs a single thread")?;
    process::set_not_dumpable().context("cannot become undumpable")?;
    let reserved = reserve_low_numbers().context("/dev/null")?;
    let init = sealed_copy(init).with_context(|| format!("cannot load {init}"))?;
    let guest = sealed_copy(guest).with_context(|| format!("cannot load {guest}"))?;
    let null =
        rustix::fs::openat(CWD, "/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).context("/dev/null")?;
    let listener = listen(socket).with_context(|| format!("cannot listen on {socket}"))?;
    let signals = process::signal_fd(&[libc::SIGCHLD]).context("signalfd")?;
    identity::keep_capabilities_over_setuid(true).context("securebits")?;
    corral_keeper::enter_private_root().map_err(|(step, e)| anyhow!("cannot build a private root: {step}: {e}"))?;
    let filter = Filter::build()?;
    let hidden = corral_keeper::Hidden::observe();
    let terminals = Terminals::prepare()
        .inspect_err(|e| eprintln!("corral-keeper: no automounter ({e}): every sandbox has a devpts from its start"))
        .ok();
    let kit = Kit { single, init, guest, filter, hidden, terminals, null, _reserved: reserved };
    Server::new(kit, listener, signals).context("epoll")?.run().context("the loop ended")
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

fn listen(path: &str) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 4)?;
    Ok(socket)
}
