//! What the keeper holds: sandboxes and commands, found by id, by slot or by process id.

use crate::output::Output;
use crate::protocol::{CommandNotice, Exit, Io, SandboxNotice};
use corral_api::ids::{CommandId, SandboxId};
use corral_sys::fork::ChildExit;
use std::collections::HashMap;
use std::os::fd::OwnedFd;

/// A sandbox.
#[derive(Debug)]
pub struct Sandbox {
    /// Its id.
    pub id: SandboxId,
    /// Its first process.
    pub pid: i32,
    /// Socket to the first process, and the request waiting for it, until its program runs.
    pub starting: Option<(OwnedFd, u64)>,
    /// How the first process ended.
    pub exit: Option<Exit>,
}

impl Sandbox {
    /// What the node is told of it.
    pub fn notice(&self) -> SandboxNotice {
        SandboxNotice { sandbox: self.id.clone(), pid: self.pid, exit: self.exit }
    }
}

/// A command or worker.
#[derive(Debug)]
pub struct Command {
    /// Its id.
    pub id: CommandId,
    /// In which sandbox.
    pub sandbox: SandboxId,
    /// First process; 0 until the helper has told it.
    pub pid: i32,
    /// Number of the helper that makes it.
    pub helper: u64,
    /// How its streams are connected.
    pub io: Io,
    /// Socket to the process, and the request waiting for it, until its program runs.
    pub starting: Option<(OwnedFd, u64)>,
    /// Open streams: standard output, standard error, control.
    pub outputs: [Option<Output>; 3],
    /// Totals of all streams, open or closed.
    pub totals: [u64; 3],
    /// Bytes no log took.
    pub lost: u64,
    /// Logs waiting for a terminal's source.
    pub waiting_log: Option<OwnedFd>,
    /// Write end of standard input, or the terminal.
    pub input: Option<OwnedFd>,
    /// How it ended.
    pub exit: Option<Exit>,
    /// Whether the node has recorded the exit.
    pub acknowledged: bool,
    /// Whether there is news for the node.
    pub dirty: bool,
}

impl Command {
    /// What the node is told of it.
    pub fn notice(&self) -> CommandNotice {
        CommandNotice {
            sandbox: self.sandbox.clone(),
            command: self.id.clone(),
            pid: self.pid,
            totals: self.totals,
            lost: self.lost,
            exit: self.exit,
            closed: self.is_closed(),
        }
    }

    /// Whether nothing more will come from its streams.
    pub fn is_closed(&self) -> bool {
        self.outputs.iter().all(Option::is_none) && self.waiting_log.is_none()
    }
}

/// Whose process id it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// First process of the sandbox in this slot.
    Sandbox(usize),
    /// First process of the command in this slot.
    Command(usize),
    /// A helper, of which nothing is left to do.
    Helper,
    /// The helper that mounts terminals for those who wait under this token.
    TerminalsOf(u32),
}

/// Slots that keep their number while they are used.
#[derive(Debug)]
pub struct Slots<T> {
    slots: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slots<T> {
    /// Puts a value into a free slot.
    pub fn insert(&mut self, value: T) -> usize {
        if let Some(slot) = self.free.pop() {
            self.slots[slot] = Some(value);
            return slot;
        }
        self.slots.push(Some(value));
        self.slots.len() - 1
    }

    /// The value in a slot.
    pub fn get(&self, slot: usize) -> Option<&T> {
        self.slots.get(slot)?.as_ref()
    }

    /// The value in a slot, to change.
    pub fn get_mut(&mut self, slot: usize) -> Option<&mut T> {
        self.slots.get_mut(slot)?.as_mut()
    }

    /// Empties a slot.
    pub fn remove(&mut self, slot: usize) -> Option<T> {
        let value = self.slots.get_mut(slot)?.take()?;
        self.free.push(slot);
        Some(value)
    }

    /// All values with their slots.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.slots.iter().enumerate().filter_map(|(i, v)| v.as_ref().map(|v| (i, v)))
    }
}

/// Most ended children kept whose id no helper has told: far more than can be starting at a time.
const MAX_UNCLAIMED: usize = 4096;

/// Everything the keeper holds.
#[derive(Debug, Default)]
pub struct Table {
    /// Sandboxes.
    pub sandboxes: Slots<Sandbox>,
    /// Commands.
    pub commands: Slots<Command>,
    /// Slot of a sandbox.
    pub by_sandbox: HashMap<SandboxId, usize>,
    /// Slot of a command.
    pub by_command: HashMap<CommandId, usize>,
    /// Owner of a process id.
    pub by_pid: HashMap<i32, Owner>,
    /// Helpers started so far.
    helpers: u64,
    /// Ended children whose helper has not told their id yet, or whose start had failed; and how many helpers had been
    /// started when they were reaped.
    unclaimed: HashMap<i32, (ChildExit, u64)>,
}

impl Table {
    /// The number of a helper that is being started.
    pub fn next_helper(&mut self) -> u64 {
        self.helpers += 1;
        self.helpers
    }

    /// Keeps the end of a child that nobody is known to own.
    pub fn keep_unclaimed(&mut self, ended: ChildExit) {
        if self.unclaimed.len() >= MAX_UNCLAIMED {
            self.unclaimed.clear();
        }
        self.unclaimed.insert(ended.pid, (ended, self.helpers));
    }

    /// The end of the child that this helper has told of, if it was reaped already. One that was reaped before the helper
    /// was started is another's, whose process id has come round again.
    pub fn claim(&mut self, pid: i32, helper: u64) -> Option<ChildExit> {
        self.unclaimed.remove(&pid).filter(|(_, helpers)| *helpers >= helper).map(|(ended, _)| ended)
    }

    /// Takes a sandbox in.
    pub fn add_sandbox(&mut self, sandbox: Sandbox) -> usize {
        let (id, pid) = (sandbox.id.clone(), sandbox.pid);
        let slot = self.sandboxes.insert(sandbox);
        self.by_sandbox.insert(id, slot);
        self.by_pid.insert(pid, Owner::Sandbox(slot));
        slot
    }

    /// Takes a command in.
    pub fn add_command(&mut self, command: Command) -> usize {
        let id = command.id.clone();
        let slot = self.commands.insert(command);
        self.by_command.insert(id, slot);
        slot
    }

    /// Forgets a command.
    pub fn remove_command(&mut self, slot: usize) -> Option<Command> {
        let command = self.commands.remove(slot)?;
        self.by_command.remove(&command.id);
        if self.by_pid.get(&command.pid) == Some(&Owner::Command(slot)) {
            self.by_pid.remove(&command.pid);
        }
        Some(command)
    }

    /// Forgets a sandbox.
    pub fn remove_sandbox(&mut self, slot: usize) -> Option<Sandbox> {
        let sandbox = self.sandboxes.remove(slot)?;
        self.by_sandbox.remove(&sandbox.id);
        if self.by_pid.get(&sandbox.pid) == Some(&Owner::Sandbox(slot)) {
            self.by_pid.remove(&sandbox.pid);
        }
        Some(sandbox)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(pid: i32, code: i32) -> ChildExit {
        ChildExit { pid, code: Some(code), signal: None, cpu_us: 0, peak_rss_kib: 0 }
    }

    #[test]
    fn an_end_is_claimed_by_a_helper_that_was_there_and_by_no_later_one() {
        let mut table = Table::default();
        let first = table.next_helper();
        table.keep_unclaimed(ended(70, 0));
        assert_eq!(table.claim(70, first), Some(ended(70, 0)), "it ended before its helper told of it");
        assert_eq!(table.claim(70, first), None, "once");

        table.keep_unclaimed(ended(80, 1));
        let later = table.next_helper();
        assert_eq!(table.claim(80, later), None, "the process id came round again");
        assert_eq!(table.claim(80, first), None, "and is forgotten with that");
    }
}
