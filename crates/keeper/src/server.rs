//! The keeper's loop: one thread, one epoll, one node at a time.
//!
//! A node that connects replaces the one before. Exits and totals are state, not messages: they are told when they
//! change and told again to a node that comes back, until it acknowledges them.

use crate::launch::{self, Kit, Starting};
use crate::output::{Output, Turn};
use crate::protocol::{
    Call, Exit, Io, Launch, LogBounds, MAX_MESSAGE, MAX_SANDBOXES, Message, Program, Reply, Request, Spawn, Step,
    VERSION,
};
use crate::spawn;
use crate::table::{Command, Owner, Sandbox, Table};
use crate::wire::{self, ReceiveError};
use corral_sys::fork::{self, ChildExit};
use rustix::event::epoll;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;
const NODE: u64 = 2;
const SANDBOX: u64 = 1 << 40;
const COMMAND: u64 = 2 << 40;
const STREAM: u64 = 3 << 40;

/// Longest list of arguments and environment in a memfd.
const MAX_PROGRAM: u64 = 4 << 20;

/// Most ended children kept whose id no helper has told: far more than can be starting at a time.
const MAX_UNCLAIMED: usize = 4096;

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
                _ => self.serve_node(),
            },
        }
    }

    fn watch(&self, fd: BorrowedFd<'_>, token: u64) {
        // Only a lack of kernel memory makes this fail; the stream is then drained at the process's end.
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN).unwrap_or(());
    }

    // --- the node ---

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

    // --- starting ---

    fn launch(&mut self, number: u64, request: &Launch, fds: Vec<OwnedFd>) {
        if let Some(known) = self.table.by_sandbox.get(&request.sandbox).and_then(|s| self.table.sandboxes.get(*s)) {
            let reply = Reply::Started { pid: known.pid, repeated: true };
            return self.reply(number, reply, None);
        }
        if self.table.by_sandbox.len() >= MAX_SANDBOXES {
            return self.reply(number, Reply::Refused { reason: "it holds as many sandboxes as it may".into() }, None);
        }
        match launch::launch(&self.kit, request, fds) {
            Ok(Starting { pid, socket }) => {
                let sandbox = Sandbox { id: request.sandbox.clone(), pid, starting: None, exit: None };
                let slot = self.table.add_sandbox(sandbox);
                self.watch(socket.as_fd(), SANDBOX | (slot as u64) << 2);
                if let Some(sandbox) = self.table.sandboxes.get_mut(slot) {
                    sandbox.starting = Some((socket, number));
                }
            }
            Err((step, errno)) => self.reply(number, Reply::Failed { step, errno: errno.raw_os_error() }, None),
        }
    }

    /// The socket to a sandbox's first process became readable: a failure, or the end that means its program runs.
    fn sandbox_reports(&mut self, slot: usize) {
        let Some(sandbox) = self.table.sandboxes.get_mut(slot) else { return };
        let Some((socket, number)) = sandbox.starting.take() else { return };
        let pid = sandbox.pid;
        match report(socket.as_fd()) {
            Report::Nothing => sandbox.starting = Some((socket, number)),
            Report::Running | Report::Terminal(_) | Report::Process(_) => {
                self.reply(number, Reply::Started { pid, repeated: false }, None)
            }
            Report::Failed(step, errno) => {
                corral_sys::process::kill(pid, libc::SIGKILL).unwrap_or(());
                self.drop_sandbox(slot);
                self.reply(number, Reply::Failed { step, errno }, None);
            }
        }
    }

    fn spawn(&mut self, number: u64, mut request: Spawn, mut fds: Vec<OwnedFd>) {
        if let Some(known) = self.command(&request.command) {
            let reply = Reply::Started { pid: known.pid, repeated: true };
            return self.reply(number, reply, None);
        }
        let init = self.table.by_sandbox.get(&request.sandbox).and_then(|s| self.table.sandboxes.get(*s));
        let Some(init) = init.filter(|s| s.exit.is_none() && s.starting.is_none()).map(|s| s.pid) else {
            return self.reply(number, Reply::Unknown, None);
        };
        let program = match request.program.take() {
            Some(program) => Ok(program),
            None => fds.pop().ok_or(Errno::BADF).and_then(read_program),
        };
        let spawned = program
            .map_err(|e| (Step::Request, e))
            .and_then(|program| spawn::spawn(&self.kit, &request, &program, init, fds));
        match spawned {
            Ok(spawned) => self.keep(number, request, spawned),
            Err((step, errno)) => self.reply(number, Reply::Failed { step, errno: errno.raw_os_error() }, None),
        }
    }

    fn keep(&mut self, number: u64, request: Spawn, spawned: spawn::Spawned) {
        let bounds = bounds_of(&request.io);
        let spawn::Spawned { helper, socket, sources, mut logs, stdin } = spawned;
        self.table.by_pid.insert(helper, Owner::Helper);
        let mut outputs = [None, None, None];
        for (stream, source) in sources.into_iter().enumerate() {
            // A terminal's log waits for its source, which comes over the socket.
            if let Some(source) = source
                && let Some(log) = logs[stream].take()
            {
                outputs[stream] = Some(Output::new(source, log, bounds, false));
            }
        }
        let slot = self.table.add_command(Command {
            id: request.command,
            sandbox: request.sandbox,
            pid: 0,
            io: request.io,
            starting: None,
            outputs,
            totals: [0; 3],
            lost: 0,
            waiting_log: logs[0].take(),
            input: stdin,
            exit: None,
            acknowledged: false,
            dirty: false,
        });
        self.watch(socket.as_fd(), COMMAND | (slot as u64) << 2);
        if let Some(command) = self.table.commands.get_mut(slot) {
            command.starting = Some((socket, number));
        }
        for stream in 0..3 {
            self.watch_stream(slot, stream);
        }
    }

    fn watch_stream(&self, slot: usize, stream: usize) {
        if let Some(output) = self.table.commands.get(slot).and_then(|c| c.outputs[stream].as_ref()) {
            self.watch(output.source(), STREAM | (slot as u64) << 2 | stream as u64);
        }
    }

    fn command_reports(&mut self, slot: usize) {
        loop {
            let Some(command) = self.table.commands.get_mut(slot) else { return };
            let Some((socket, number)) = command.starting.take() else { return };
            let pid = command.pid;
            match report(socket.as_fd()) {
                Report::Nothing => {
                    command.starting = Some((socket, number));
                    return;
                }
                Report::Process(pid) => {
                    command.starting = Some((socket, number));
                    command.pid = pid;
                    if let Some(ended) = self.table.unclaimed.remove(&pid) {
                        return self.command_ended(slot, ended);
                    }
                    self.table.by_pid.insert(pid, Owner::Command(slot));
                }
                Report::Running if pid == 0 => {
                    self.table.remove_command(slot);
                    let reply = Reply::Failed { step: Step::Died, errno: Errno::CHILD.raw_os_error() };
                    return self.reply(number, reply, None);
                }
                Report::Terminal(master) => {
                    let bounds = bounds_of(&command.io);
                    command.starting = Some((socket, number));
                    let copy = rustix::io::dup(&master).ok();
                    rustix::io::ioctl_fionbio(&master, true).unwrap_or(());
                    if let (Some(log), Some(copy)) = (command.waiting_log.take(), copy) {
                        command.input = Some(copy);
                        command.outputs[0] = Some(Output::new(master, log, bounds, true));
                        self.watch_stream(slot, 0);
                    }
                }
                Report::Running => {
                    let input = command.input.as_ref().and_then(|fd| rustix::io::dup(fd).ok());
                    let ended = command.exit.is_some();
                    self.reply(number, Reply::Started { pid, repeated: false }, input);
                    return if ended { self.tell_end(slot) } else { self.mark(slot) };
                }
                Report::Failed(step, errno) => {
                    // The process ends by itself; nobody asks for it any more.
                    self.table.remove_command(slot);
                    return self.reply(number, Reply::Failed { step, errno }, None);
                }
            }
        }
    }

    // --- output and ends ---

    fn stream_ready(&mut self, slot: usize, stream: usize) {
        let Some(command) = self.table.commands.get_mut(slot) else { return };
        let Some(output) = command.outputs.get_mut(stream).and_then(Option::as_mut) else { return };
        let turn = output.drain();
        command.totals[stream] = output.total();
        if turn == Turn::Closed {
            command.lost += output.lost();
            command.outputs[stream] = None;
        }
        // What a session's shell says on the control pipe comes after all that its command wrote.
        if stream == 2 {
            self.drain_all(slot);
        }
        self.mark(slot);
        if turn == Turn::Closed {
            self.forget_if_over(slot);
        }
    }

    /// Takes everything that is in the pipes now.
    fn drain_all(&mut self, slot: usize) {
        /// Most turns, so that a flood by a surviving child cannot hold the keeper: far more than a pipe holds.
        const TURNS: usize = 4;
        let Some(command) = self.table.commands.get_mut(slot) else { return };
        for stream in 0..3 {
            for _ in 0..TURNS {
                let Some(output) = command.outputs[stream].as_mut() else { break };
                let turn = output.drain();
                command.totals[stream] = output.total();
                match turn {
                    Turn::More => {}
                    Turn::Empty => break,
                    Turn::Closed => {
                        command.lost += output.lost();
                        command.outputs[stream] = None;
                    }
                }
            }
        }
    }

    fn reap(&mut self) {
        let mut info = [0u8; 128 * 8];
        while matches!(rustix::io::read(&self.signals, &mut info), Ok(n) if n > 0) {}
        while let Ok(Some(ended)) = fork::try_reap_any() {
            match self.table.by_pid.remove(&ended.pid) {
                Some(Owner::Sandbox(slot)) => self.sandbox_ended(slot, ended),
                Some(Owner::Command(slot)) => self.command_ended(slot, ended),
                Some(Owner::Helper) => {}
                None => {
                    if self.table.unclaimed.len() >= MAX_UNCLAIMED {
                        self.table.unclaimed.clear();
                    }
                    self.table.unclaimed.insert(ended.pid, ended);
                }
            }
        }
    }

    fn sandbox_ended(&mut self, slot: usize, ended: ChildExit) {
        // A last report may wait: whether its program ever ran.
        self.sandbox_reports(slot);
        let Some(sandbox) = self.table.sandboxes.get_mut(slot) else { return };
        if let Some((_, number)) = sandbox.starting.take() {
            self.drop_sandbox(slot);
            let reply = Reply::Failed { step: Step::Died, errno: Errno::CHILD.raw_os_error() };
            return self.reply(number, reply, None);
        }
        sandbox.exit = Some(exit_of(ended));
        let notice = sandbox.notice();
        self.send(&Message::Sandbox(notice), None);
    }

    fn command_ended(&mut self, slot: usize, ended: ChildExit) {
        self.command_reports(slot);
        self.drain_all(slot);
        let Some(command) = self.table.commands.get_mut(slot) else { return };
        command.exit = Some(exit_of(ended));
        // A terminal's last user may be a surviving child; the node needs no input for another ended command.
        if !matches!(command.io, Io::Terminal { .. }) {
            command.input = None;
        }
        // The helper may still hold the socket: then its closing completes the start, and this end is told after it.
        if command.starting.is_none() {
            self.tell_end(slot);
        }
    }

    /// Tells the node of a command's end; of a worker's nobody needs to know.
    fn tell_end(&mut self, slot: usize) {
        if self.table.commands.get(slot).is_some_and(|c| c.io == Io::Worker) {
            self.table.remove_command(slot);
        } else {
            self.mark(slot);
        }
    }

    fn forget_if_over(&mut self, slot: usize) {
        if let Some(command) = self.table.commands.get(slot)
            && command.acknowledged
            && command.exit.is_some()
            && command.is_closed()
        {
            self.table.remove_command(slot);
        }
    }

    fn drop_sandbox(&mut self, slot: usize) {
        if let Some(sandbox) = self.table.remove_sandbox(slot)
            && let Some(remover) = launch::remove_shm(&self.kit, &sandbox.id)
        {
            self.table.by_pid.insert(remover, Owner::Helper);
        }
    }

    fn forget(&mut self, number: u64, id: &corral_api::ids::SandboxId) {
        let Some(slot) = self.table.by_sandbox.get(id).copied() else {
            return self.reply(number, Reply::Unknown, None);
        };
        if self.table.sandboxes.get(slot).is_some_and(|s| s.exit.is_none()) {
            return self.reply(number, Reply::Refused { reason: "it still runs".into() }, None);
        }
        self.drop_sandbox(slot);
        let commands: Vec<usize> =
            self.table.commands.iter().filter(|(_, c)| c.sandbox == *id).map(|(s, _)| s).collect();
        for slot in commands {
            self.table.remove_command(slot);
        }
        self.reply(number, Reply::Done, None);
    }
}

fn exit_of(ended: ChildExit) -> Exit {
    Exit { code: ended.code, signal: ended.signal, cpu_us: ended.cpu_us, peak_rss_kib: ended.peak_rss_kib }
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
