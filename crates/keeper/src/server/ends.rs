//! Output, ends of processes, and forgetting.

use super::Server;
use crate::launch;
use crate::output::Turn;
use crate::protocol::{Exit, Io, Message, Reply, Step};
use crate::table::Owner;
use corral_sys::fork::{self, ChildExit};
use rustix::io::Errno;

impl Server {
    pub(super) fn stream_ready(&mut self, slot: usize, stream: usize) {
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
    pub(super) fn drain_all(&mut self, slot: usize) {
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

    pub(super) fn reap(&mut self) {
        let mut info = [0u8; 128 * 8];
        while matches!(rustix::io::read(&self.signals, &mut info), Ok(n) if n > 0) {}
        while let Ok(Some(ended)) = fork::try_reap_any() {
            match self.table.by_pid.remove(&ended.pid) {
                Some(Owner::Sandbox(slot)) => self.sandbox_ended(slot, ended),
                Some(Owner::Command(slot)) => self.command_ended(slot, ended),
                Some(Owner::Helper) => {}
                Some(Owner::TerminalsOf(token)) => self.answer_terminals(token, ended.code == Some(0)),
                None => self.table.keep_unclaimed(ended),
            }
        }
    }

    pub(super) fn sandbox_ended(&mut self, slot: usize, ended: ChildExit) {
        // A last report may wait: whether its program ever ran.
        self.sandbox_reports(slot);
        let Some(sandbox) = self.table.sandboxes.get_mut(slot) else { return };
        if let Some((_, number)) = sandbox.starting.take() {
            self.drop_sandbox(slot);
            let reply = Reply::Failed { step: Step::Died, errno: Errno::CHILD.raw_os_error() };
            return self.reply(number, reply, None);
        }
        sandbox.exit = Some(Exit::from(ended));
        let notice = sandbox.notice();
        self.send(&Message::Sandbox(notice), None);
    }

    pub(super) fn command_ended(&mut self, slot: usize, ended: ChildExit) {
        self.command_reports(slot);
        self.drain_all(slot);
        let Some(command) = self.table.commands.get_mut(slot) else { return };
        command.exit = Some(Exit::from(ended));
        // A terminal's last user may be a surviving child; the node needs no input for another ended command.
        if !matches!(command.io, Io::Terminal { .. }) {
            command.input = None;
        }
        // The helper may still hold the socket: then its closing completes the start, and this end is told after it.
        let started = command.starting.is_none();
        self.bound_survivors(slot);
        if started {
            self.tell_end(slot);
        }
    }

    /// Closes streams of commands that ended before this one, where survivors hold more of them open than is bounded:
    /// descriptors are this process's, for all sandboxes. A survivor that writes on gets a broken pipe.
    fn bound_survivors(&mut self, slot: usize) {
        const EACH: usize = 64;
        const ALL: usize = 2000;
        let Some(command) = self.table.commands.get(slot).filter(|c| !c.is_closed()) else { return };
        let of = command.sandbox.clone();
        let mut held: Vec<(u64, usize, bool)> = Vec::new();
        for (slot, command) in self.table.commands.iter() {
            if command.exit.is_some() && !command.is_closed() {
                held.push((command.helper, slot, command.sandbox == of));
            }
        }
        held.sort_unstable();
        let mine = held.iter().filter(|(_, _, own)| *own).count();
        let surplus = if mine > EACH { mine - EACH } else { held.len().saturating_sub(ALL).min(mine) };
        let oldest: Vec<usize> =
            held.iter().filter(|(_, _, own)| *own).take(surplus).map(|(_, slot, _)| *slot).collect();
        for slot in oldest {
            self.drain_all(slot);
            if let Some(command) = self.table.commands.get_mut(slot) {
                command.outputs = [None, None, None];
                command.waiting_log = None;
                command.input = None;
            }
            self.mark(slot);
            self.forget_if_over(slot);
        }
    }

    /// Tells the node of a command's end; of a worker's nobody needs to know.
    pub(super) fn tell_end(&mut self, slot: usize) {
        if self.table.commands.get(slot).is_some_and(|c| c.io == Io::Worker) {
            self.table.remove_command(slot);
        } else {
            self.mark(slot);
        }
    }

    pub(super) fn forget_if_over(&mut self, slot: usize) {
        if let Some(command) = self.table.commands.get(slot)
            && command.acknowledged
            && command.exit.is_some()
            && command.is_closed()
        {
            self.table.remove_command(slot);
        }
    }

    pub(super) fn drop_sandbox(&mut self, slot: usize) {
        if let Some(sandbox) = self.table.remove_sandbox(slot)
            && let Some(remover) = launch::remove_places(&self.kit, &sandbox.id)
        {
            self.table.by_pid.insert(remover, Owner::Helper);
        }
    }

    pub(super) fn forget(&mut self, number: u64, id: &corral_api::ids::SandboxId) {
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
            let waiting = self.table.remove_command(slot).and_then(|command| command.starting);
            if let Some((_, waiting)) = waiting {
                // Whoever asked for it is waiting still.
                self.reply(waiting, Reply::Unknown, None);
            }
        }
        self.reply(number, Reply::Done, None);
    }
}
