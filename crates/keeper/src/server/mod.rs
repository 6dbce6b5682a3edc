//! The keeper's loop: one thread, one epoll, one node at a time.
//!
//! A node that connects replaces the one before. Exits and totals are state, not messages: they are told when they
//! change and told again to a node that comes back, until it acknowledges them.

mod ends;
mod replace;
mod starting;

use crate::kit::Kit;
use crate::protocol::{Call, Io, LogBounds, MAX_MESSAGE, Message, Program, Reply, Request, Step, VERSION};
use crate::table::{Command, Table};
use crate::wire::{self, ReceiveError};
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;
const NODE: u64 = 2;
const TERMINALS: u64 = 3;
const SANDBOX: u64 = 1 << 40;
const COMMAND: u64 = 2 << 40;
const STREAM: u64 = 3 << 40;

/// Longest list of arguments and environment in a memfd.
const MAX_PROGRAM: u64 = 4 << 20;

struct Node {
    socket: OwnedFd,
    unsent: VecDeque<(Vec<u8>, Option<OwnedFd>)>,
    greeted: bool,
}

/// The keeper.
pub struct Server {
    kit: Kit,
    listener: OwnedFd,
    signals: OwnedFd,
    epoll: OwnedFd,
    node: Option<Node>,
    table: Table,
    /// Commands whose news were not told yet.
    dirty: Vec<usize>,
    buffer: Vec<u8>,
    ended: bool,
}

impl Server {
    /// A keeper that listens on this socket and learns of ended children from this signal descriptor.
    ///
    /// # Errors
    /// Those of epoll(7).
    pub fn new(kit: Kit, listener: OwnedFd, signals: OwnedFd) -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &signals, epoll::EventData::new_u64(SIGNALS), epoll::EventFlags::IN)?;
        if let Some(terminals) = &kit.terminals {
            let data = epoll::EventData::new_u64(TERMINALS);
            epoll::add(&epoll, terminals.pipe(), data, epoll::EventFlags::IN)?;
        }
        Ok(Self {
            kit,
            listener,
            signals,
            epoll,
            node: None,
            table: Table::default(),
            dirty: Vec::new(),
            buffer: vec![0; MAX_MESSAGE],
            ended: false,
        })
    }

    /// A keeper that goes on where another program of it left off in this process.
    ///
    /// # Errors
    /// Those of epoll(7).
    pub fn resume(kit: Kit, listener: OwnedFd, signals: OwnedFd, table: Table) -> Result<Self, Errno> {
        let mut server = Self::new(kit, listener, signals)?;
        server.table = table;
        let commands: Vec<usize> = server.table.commands.iter().map(|(slot, _)| slot).collect();
        for slot in commands {
            for stream in 0..3 {
                server.watch_stream(slot, stream);
            }
        }
        // Whoever ended meanwhile was told to the program before.
        server.reap();
        Ok(server)
    }

    /// Serves until the node asks for the end.
    ///
    /// # Errors
    /// Those of epoll_wait(2).
    pub fn run(&mut self) -> Result<(), Errno> {
        let mut events = Vec::with_capacity(256);
        while !self.ended {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(other) => return Err(other),
            }
            for event in &events {
                self.handle(event.data.u64());
            }
            self.flush();
        }
        Ok(())
    }

    fn handle(&mut self, token: u64) {
        let slot = ((token & (SANDBOX - 1)) >> 2) as usize;
        match token & !(SANDBOX - 1) {
            SANDBOX => self.sandbox_reports(slot),
            COMMAND => self.command_reports(slot),
            STREAM => self.stream_ready(slot, (token & 3) as usize),
            _ => match token {
                LISTENER => self.accept(),
                SIGNALS => self.reap(),
                TERMINALS => self.mount_terminals(),
                _ => self.serve_node(),
            },
        }
    }

    fn watch(&self, fd: BorrowedFd<'_>, token: u64) {
        // Only a lack of kernel memory makes this fail; the stream is then drained at the process's end.
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN).unwrap_or(());
    }

    fn accept(&mut self) {
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        let Ok(socket) = rustix::net::accept_with(&self.listener, flags) else { return };
        self.drop_node();
        let watched = epoll::add(
            &self.epoll,
            &socket,
            epoll::EventData::new_u64(NODE),
            epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET,
        );
        if watched.is_ok() {
            self.node = Some(Node { socket, unsent: VecDeque::new(), greeted: false });
        }
    }

    fn drop_node(&mut self) {
        // Closing the descriptor takes it out of the epoll set.
        self.node = None;
    }

    fn serve_node(&mut self) {
        loop {
            let Some(node) = &self.node else { return };
            match wire::receive(node.socket.as_fd(), &mut self.buffer) {
                Ok(received) => match postcard::from_bytes::<Call>(&received.bytes) {
                    Ok(call) => self.answer(call, received.fds),
                    Err(_) => return self.drop_node(),
                },
                Err(ReceiveError::WouldBlock) => return,
                Err(_) => return self.drop_node(),
            }
            self.flush();
        }
    }

    fn send(&mut self, message: &Message, fd: Option<OwnedFd>) {
        let Some(node) = &mut self.node else { return };
        let Ok(bytes) = postcard::to_stdvec(message) else { return };
        node.unsent.push_back((bytes, fd));
    }

    fn reply(&mut self, number: u64, reply: Reply, fd: Option<OwnedFd>) {
        self.send(&Message::Reply { number, reply }, fd);
    }

    /// Sends what waits, and news of commands as far as the socket takes them.
    fn flush(&mut self) {
        loop {
            let Some(node) = &mut self.node else { return };
            while let Some((bytes, fd)) = node.unsent.front() {
                let fds: Vec<BorrowedFd<'_>> = fd.iter().map(AsFd::as_fd).collect();
                match wire::send(node.socket.as_fd(), bytes, &fds) {
                    Ok(()) => {
                        node.unsent.pop_front();
                    }
                    Err(Errno::AGAIN) => return,
                    Err(_) => return self.drop_node(),
                }
            }
            if !node.greeted {
                return;
            }
            let Some(slot) = self.dirty.pop() else { return };
            let Some(command) = self.table.commands.get_mut(slot) else { continue };
            if std::mem::take(&mut command.dirty) && command.starting.is_none() {
                let notice = Message::Command(command.notice());
                self.send(&notice, None);
            }
        }
    }

    fn mark(&mut self, slot: usize) {
        if let Some(command) = self.table.commands.get_mut(slot)
            && command.io != Io::Worker
            && !std::mem::replace(&mut command.dirty, true)
        {
            self.dirty.push(slot);
        }
    }

    fn answer(&mut self, call: Call, fds: Vec<OwnedFd>) {
        let number = call.number;
        match call.request {
            Request::Who => {
                let reply = Reply::Keeper { version: VERSION, build: self.kit.build.clone() };
                self.reply(number, reply, None);
            }
            Request::Upgrade { build } => {
                let reply = self.replace(&build, &fds);
                self.reply(number, reply, None);
            }
            Request::Hello { version } => self.greet(number, version),
            Request::Launch(request) => self.launch(number, &request, fds),
            Request::Spawn(request) => self.spawn(number, request, fds),
            Request::Signal { command, signal } => {
                let reply = match self.command(&command) {
                    Some(c) if c.exit.is_none() && c.pid > 0 => match corral_sys::process::kill(c.pid, signal) {
                        Ok(()) => Reply::Done,
                        Err(e) => Reply::Failed { step: Step::Request, errno: e.raw_os_error() },
                    },
                    Some(_) => Reply::Done,
                    None => Reply::Unknown,
                };
                self.reply(number, reply, None);
            }
            Request::CloseInput { command } => {
                let reply = match self.table.by_command.get(&command).and_then(|s| self.table.commands.get_mut(*s)) {
                    Some(c) => {
                        c.input = None;
                        Reply::Done
                    }
                    None => Reply::Unknown,
                };
                self.reply(number, reply, None);
            }
            Request::Input { command } => {
                let input = self.command(&command).map(|c| c.input.as_ref().and_then(|fd| rustix::io::dup(fd).ok()));
                match input {
                    Some(fd) => self.reply(number, Reply::Done, fd),
                    None => self.reply(number, Reply::Unknown, None),
                }
            }
            Request::Acknowledge { command } => {
                if let Some(slot) = self.table.by_command.get(&command).copied() {
                    if let Some(c) = self.table.commands.get_mut(slot) {
                        c.acknowledged = true;
                    }
                    self.forget_if_over(slot);
                }
                self.reply(number, Reply::Done, None);
            }
            Request::Forget { sandbox } => self.forget(number, &sandbox),
            Request::Shutdown => {
                if self.table.by_sandbox.is_empty() {
                    self.ended = true;
                    self.reply(number, Reply::Done, None);
                } else {
                    self.reply(number, Reply::Refused { reason: "it holds sandboxes".into() }, None);
                }
            }
        }
    }

    fn command(&self, id: &corral_api::ids::CommandId) -> Option<&Command> {
        self.table.commands.get(*self.table.by_command.get(id)?)
    }

    fn greet(&mut self, number: u64, version: u32) {
        if version != VERSION {
            let reason = format!("the keeper speaks version {VERSION}, the node {version}");
            return self.reply(number, Reply::Refused { reason }, None);
        }
        let sandboxes: Vec<_> =
            self.table.sandboxes.iter().filter(|(_, s)| s.starting.is_none()).map(|(_, s)| s.notice()).collect();
        let commands: Vec<_> = self
            .table
            .commands
            .iter()
            .filter(|(_, c)| c.starting.is_none() && c.io != Io::Worker)
            .map(|(_, c)| c.notice())
            .collect();
        for notice in sandboxes {
            self.send(&Message::Sandbox(notice), None);
        }
        for notice in commands {
            self.send(&Message::Command(notice), None);
        }
        if let Some(node) = &mut self.node {
            node.greeted = true;
        }
        self.reply(number, Reply::Hello { version: VERSION }, None);
    }
}

fn bounds_of(io: &Io) -> LogBounds {
    match io {
        Io::Pipes { bounds, .. } | Io::Terminal { bounds, .. } => *bounds,
        Io::Worker => LogBounds { head_bytes: 0, tail_bytes: 0 },
    }
}

enum Report {
    Nothing,
    Process(i32),
    Running,
    Terminal(OwnedFd),
    Failed(Step, i32),
}

/// Reads what a starting process says. A closed socket means that its program runs (or that it died: the exit tells).
fn report(socket: BorrowedFd<'_>) -> Report {
    let mut buffer = [0u8; 16];
    match wire::receive(socket, &mut buffer) {
        Ok(got) => match (got.bytes.as_slice(), got.fds.into_iter().next()) {
            ([b'T'], Some(master)) => Report::Terminal(master),
            ([b'P', a, b, c, d], _) => Report::Process(i32::from_le_bytes([*a, *b, *c, *d])),
            ([b'E', step, errno], _) => {
                Report::Failed(Step::from_number(*step).unwrap_or(Step::Died), i32::from(*errno))
            }
            _ => Report::Failed(Step::Died, Errno::PROTO.raw_os_error()),
        },
        Err(ReceiveError::WouldBlock) => Report::Nothing,
        Err(_) => Report::Running,
    }
}

fn read_program(memfd: OwnedFd) -> Result<Program, Errno> {
    let size = rustix::fs::fstat(&memfd)?.st_size as u64;
    if size > MAX_PROGRAM {
        return Err(Errno::TOOBIG);
    }
    let mut bytes = Vec::with_capacity(size as usize);
    std::fs::File::from(memfd).take(MAX_PROGRAM).read_to_end(&mut bytes).map_err(|_| Errno::IO)?;
    postcard::from_bytes(&bytes).map_err(|_| Errno::INVAL)
}
