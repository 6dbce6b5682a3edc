//! Starting sandboxes and commands, and what they report until their programs run.

use super::{COMMAND, Report, SANDBOX, STREAM, Server, bounds_of, read_program, report};
use crate::launch::{self, Starting};
use crate::output::Output;
use crate::protocol::{Launch, MAX_SANDBOXES, Reply, Spawn, Step};
use crate::spawn;
use crate::table::{Command, Owner, Sandbox};
use crate::terminals::{self, Terminals};
use corral_api::ids::SandboxId;
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

impl Server {
    pub(super) fn launch(&mut self, number: u64, request: &Launch, fds: Vec<OwnedFd>) {
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
    pub(super) fn sandbox_reports(&mut self, slot: usize) {
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

    /// Something in a sandbox looks for its terminals.
    pub(super) fn mount_terminals(&mut self) {
        while let Some(wanted) = self.kit.terminals.as_ref().and_then(Terminals::next) {
            let sandbox = wanted.sandbox.parse().ok().and_then(|id: SandboxId| self.table.by_sandbox.get(&id).copied());
            let init = sandbox.and_then(|slot| self.table.sandboxes.get(slot)).map(|s| s.pid);
            match init.map(|init| terminals::mount_in(self.kit.single, init)) {
                Some(Ok(helper)) => {
                    self.table.by_pid.insert(helper, Owner::TerminalsOf(wanted.token));
                }
                Some(Err(_)) | None => self.answer_terminals(wanted.token, false),
            }
        }
    }

    pub(super) fn answer_terminals(&self, token: u32, mounted: bool) {
        if let Some(terminals) = &self.kit.terminals {
            terminals.answer(token, mounted);
        }
    }

    pub(super) fn spawn(&mut self, number: u64, mut request: Spawn, mut fds: Vec<OwnedFd>) {
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

    pub(super) fn keep(&mut self, number: u64, request: Spawn, spawned: spawn::Spawned) {
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
        let number_of_helper = self.table.next_helper();
        let slot = self.table.add_command(Command {
            id: request.command,
            sandbox: request.sandbox,
            pid: 0,
            helper: number_of_helper,
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

    pub(super) fn watch_stream(&self, slot: usize, stream: usize) {
        if let Some(output) = self.table.commands.get(slot).and_then(|c| c.outputs[stream].as_ref()) {
            self.watch(output.source(), STREAM | (slot as u64) << 2 | stream as u64);
        }
    }

    pub(super) fn command_reports(&mut self, slot: usize) {
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
                    let helper = command.helper;
                    if let Some(ended) = self.table.claim(pid, helper) {
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
                    if pid > 0 {
                        self.table.by_pid.insert(pid, Owner::Helper);
                    }
                    return self.reply(number, Reply::Failed { step, errno }, None);
                }
            }
        }
    }
}
