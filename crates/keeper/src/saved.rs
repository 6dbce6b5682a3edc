//! What a keeper hands to the program that takes its place: everything it holds, with descriptors by number.
//!
//! Written as JSON, so that programs of different versions read each other: new fields have defaults, old ones stay.

use crate::output::{Output, SavedOutput};
use crate::protocol::{Exit, Io};
use crate::table::{Command, Owner, Sandbox, Table};
use crate::terminals::Terminals;
use corral_api::ids::{CommandId, SandboxId};
use corral_sys::fork::ChildExit;
use corral_sys::process;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Everything.
#[derive(Debug, Serialize, Deserialize)]
pub struct Saved {
    listener: i32,
    sandboxes: Vec<SavedSandbox>,
    commands: Vec<SavedCommand>,
    #[serde(default)]
    terminals: Option<[i32; 2]>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedSandbox {
    id: SandboxId,
    pid: i32,
    exit: Option<Exit>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedCommand {
    id: CommandId,
    sandbox: SandboxId,
    pid: i32,
    io: Io,
    outputs: [Option<SavedOutput>; 3],
    totals: [u64; 3],
    lost: u64,
    input: Option<i32>,
    exit: Option<Exit>,
    acknowledged: bool,
}

/// What was saved, as it is held again.
#[derive(Debug)]
pub struct Restored {
    /// The socket that nodes connect to.
    pub listener: OwnedFd,
    /// Sandboxes and commands.
    pub table: Table,
    /// Terminals on first use, where the keeper before had them.
    pub terminals: Option<Terminals>,
}

impl Saved {
    /// Describes what is held. Nothing may be starting.
    pub fn of(listener: &OwnedFd, table: &Table, terminals: Option<&Terminals>) -> Self {
        Self {
            listener: listener.as_raw_fd(),
            sandboxes: table.sandboxes.iter().map(|(_, s)| save_sandbox(s)).collect(),
            commands: table.commands.iter().map(|(_, c)| save_command(c)).collect(),
            terminals: terminals.map(Terminals::numbers),
        }
    }

    /// Takes the descriptors, which this process inherited.
    ///
    /// # Errors
    /// When one is not there.
    pub fn restore(self) -> Result<Restored, Errno> {
        let mut table = Table::default();
        for SavedSandbox { id, pid, exit } in self.sandboxes {
            table.add_sandbox(Sandbox { id, pid, starting: None, exit });
            if exit.is_some() {
                table.by_pid.remove(&pid);
            }
        }
        for saved in self.commands {
            let (pid, runs) = (saved.pid, saved.exit.is_none());
            let slot = table.add_command(restore_command(saved)?);
            if runs {
                table.by_pid.insert(pid, Owner::Command(slot));
            }
        }
        Ok(Restored {
            listener: process::inherited(self.listener)?,
            table,
            terminals: self.terminals.map(Terminals::inherit).transpose()?,
        })
    }
}

/// Lets what is saved outlive the next exec, or not.
///
/// # Errors
/// Those of fcntl(2).
pub fn set_inheritable(
    listener: &OwnedFd,
    table: &Table,
    terminals: Option<&Terminals>,
    inheritable: bool,
) -> Result<(), Errno> {
    use rustix::io::{FdFlags, fcntl_setfd};
    let flags = if inheritable { FdFlags::empty() } else { FdFlags::CLOEXEC };
    fcntl_setfd(listener, flags)?;
    for (_, command) in table.commands.iter() {
        for fd in
            command.outputs.iter().flatten().flat_map(Output::descriptors).chain(command.input.iter().map(AsFd::as_fd))
        {
            fcntl_setfd(fd, flags)?;
        }
    }
    for fd in terminals.iter().flat_map(|t| t.descriptors()) {
        fcntl_setfd(fd, flags)?;
    }
    Ok(())
}

fn save_sandbox(sandbox: &Sandbox) -> SavedSandbox {
    SavedSandbox { id: sandbox.id.clone(), pid: sandbox.pid, exit: sandbox.exit }
}

fn save_command(command: &Command) -> SavedCommand {
    SavedCommand {
        id: command.id.clone(),
        sandbox: command.sandbox.clone(),
        pid: command.pid,
        io: command.io.clone(),
        outputs: command.outputs.each_ref().map(|output| output.as_ref().map(Output::save)),
        totals: command.totals,
        lost: command.lost,
        input: command.input.as_ref().map(AsRawFd::as_raw_fd),
        exit: command.exit,
        acknowledged: command.acknowledged,
    }
}

fn restore_command(saved: SavedCommand) -> Result<Command, Errno> {
    let mut outputs = [None, None, None];
    for (output, saved) in outputs.iter_mut().zip(saved.outputs) {
        *output = saved.map(Output::restore).transpose()?;
    }
    Ok(Command {
        id: saved.id,
        sandbox: saved.sandbox,
        pid: saved.pid,
        helper: 0,
        io: saved.io,
        starting: None,
        outputs,
        totals: saved.totals,
        lost: saved.lost,
        waiting_log: None,
        input: saved.input.map(process::inherited).transpose()?,
        exit: saved.exit,
        acknowledged: saved.acknowledged,
        dirty: false,
    })
}

impl From<ChildExit> for Exit {
    fn from(ended: ChildExit) -> Self {
        Self { code: ended.code, signal: ended.signal, cpu_us: ended.cpu_us, peak_rss_kib: ended.peak_rss_kib }
    }
}
