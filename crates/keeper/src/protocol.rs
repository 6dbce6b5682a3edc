//! Messages between node and keeper. Each is one seqpacket message (postcard), with descriptors beside it.
//!
//! The node sends [`Request`]s, numbered; the keeper answers each with one [`Message::Reply`] and sends notices of its
//! own. A sandbox or command id that the keeper knows already is not started again: the reply says so.

use corral_api::ids::{CommandId, SandboxId};
use serde::{Deserialize, Serialize};

/// Version of this protocol; both sides must have the same.
pub const VERSION: u32 = 2;
/// Longest message. Longer argument lists travel in a memfd.
pub const MAX_MESSAGE: usize = 160 << 10;
/// Sandboxes one keeper takes: it is limited to 20,000 descriptors where hosts are strict.
pub const MAX_SANDBOXES: usize = 1000;

/// A request and its number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Repeated in the reply.
    pub number: u64,
    /// What is wanted.
    pub request: Request,
}

/// What the node asks for. `Who` and `Upgrade` keep their place and form in all versions, so that a node can replace a
/// keeper of any other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Which keeper are you? Replies `Keeper`.
    Who,
    /// Execute another version of the keeper in its process, with all it holds. Descriptors: the program, the program
    /// of first processes, that of workers. The connection breaks when it does; `Refused` while something is starting.
    Upgrade {
        /// Which programs these are.
        build: String,
    },
    /// First message: states the version; the keeper tells everything it holds, then replies `Hello`.
    Hello {
        /// The node's protocol version.
        version: u32,
    },
    /// Start a sandbox. Descriptors: `cgroups` files to write the process id to, the v2 cgroup directory when
    /// `unified`, upper directory, work directory, `binds.len()` detached mounts, `lowers` detached mounts from the
    /// top down.
    Launch(Launch),
    /// Start a command or a worker. Descriptors: `cgroups` files, the v2 cgroup directory when `unified`, and for a
    /// command its log files (stdout, stderr unless merged or a terminal, control when `control`), for a worker its
    /// socket; last a memfd with the `Program` when `program` is absent.
    Spawn(Spawn),
    /// Send a signal to a command's first process.
    Signal {
        /// Which command.
        command: CommandId,
        /// Signal number.
        signal: i32,
    },
    /// Close the command's standard input on the keeper's side.
    CloseInput {
        /// Which command.
        command: CommandId,
    },
    /// Hand out the command's standard input or terminal once more.
    Input {
        /// Which command.
        command: CommandId,
    },
    /// The exit of this command is recorded; it may be forgotten once its pipes are closed.
    Acknowledge {
        /// Which command.
        command: CommandId,
    },
    /// The end of this sandbox is recorded: forget it and all its commands.
    Forget {
        /// Which sandbox.
        sandbox: SandboxId,
    },
    /// End the keeper. Refused while it holds a sandbox.
    Shutdown,
}

/// A sandbox to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Its id.
    pub sandbox: SandboxId,
    /// First host uid and gid of its 65,536.
    pub id_base: u32,
    /// Host name inside.
    pub hostname: String,
    /// Whether hosts and hostname files are written because the host name is not the usual one.
    pub write_names: bool,
    /// Cores its processes may run on; empty = all.
    pub affinity: Vec<u16>,
    /// Set-user-id programs may gain rights.
    pub allow_setuid: bool,
    /// Descriptors of cgroup files that take a process id.
    pub cgroups: u8,
    /// Whether a v2 cgroup directory comes along.
    pub unified: bool,
    /// Where in the sandbox each bound mount goes, such as `proc/meminfo`.
    pub binds: Vec<String>,
    /// How many lower layers come along.
    pub lowers: u16,
}

/// A process to start in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spawn {
    /// In which sandbox.
    pub sandbox: SandboxId,
    /// Its id.
    pub command: CommandId,
    /// What to run; absent when it comes in a memfd.
    pub program: Option<Program>,
    /// First host uid and gid of the sandbox's 65,536.
    pub id_base: u32,
    /// User inside.
    pub uid: u32,
    /// Group inside.
    pub gid: u32,
    /// Supplementary groups inside.
    pub groups: Vec<u32>,
    /// Limit on open files.
    pub open_files: u32,
    /// Cores it may run on; empty = all.
    pub affinity: Vec<u16>,
    /// Set-user-id programs may gain rights.
    pub allow_setuid: bool,
    /// How its standard streams are connected.
    pub io: Io,
    /// Descriptors of cgroup files that take a process id.
    pub cgroups: u8,
    /// Whether a v2 cgroup directory comes along.
    pub unified: bool,
}

/// Program, arguments, environment and directory of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Arguments; the first names the program.
    pub argv: Vec<String>,
    /// `KEY=value` each.
    pub env: Vec<String>,
    /// Working directory.
    pub cwd: String,
}

/// Standard streams of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Io {
    /// Pipes, drained into logs.
    Pipes {
        /// Give the write end of standard input to the node.
        stdin: bool,
        /// Standard error goes where standard output goes.
        merge: bool,
        /// A further pipe, given to the process as descriptor 9, drained into a third log.
        control: bool,
        /// Bounds of each log.
        bounds: LogBounds,
    },
    /// A terminal, drained into one log.
    Terminal {
        /// Columns.
        cols: u16,
        /// Rows.
        rows: u16,
        /// Bounds of the log.
        bounds: LogBounds,
    },
    /// A worker of the platform: the guest program with the node's socket as descriptor 3, outside the sandbox's
    /// process namespace.
    Worker,
}

/// How much of a stream is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogBounds {
    /// Bytes kept from the start.
    pub head_bytes: u64,
    /// Bytes kept from the end.
    pub tail_bytes: u64,
}

/// What the keeper sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Answer to the request of this number.
    Reply {
        /// The request's number.
        number: u64,
        /// The answer.
        reply: Reply,
    },
    /// A sandbox the keeper holds (after `Hello`), or whose first process has ended.
    Sandbox(SandboxNotice),
    /// A command the keeper holds (after `Hello`), or that wrote or ended.
    Command(CommandNotice),
}

/// Answers. `Keeper` and `Refused` keep their place and form in all versions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Who answers.
    Keeper {
        /// Version of the protocol it speaks.
        version: u32,
        /// The programs it was started with.
        build: String,
    },
    /// The keeper is full or busy, or the request was malformed: why.
    Refused {
        /// Why.
        reason: String,
    },
    /// Same version; everything held was told before this.
    Hello {
        /// The keeper's protocol version.
        version: u32,
    },
    /// The sandbox runs, or the command; a descriptor comes along for standard input or a terminal.
    Started {
        /// Process id on the host.
        pid: i32,
        /// It was known already and not started again.
        repeated: bool,
    },
    /// Done.
    Done,
    /// It could not be started: the step that failed and its error number.
    Failed {
        /// Which step.
        step: Step,
        /// Error number.
        errno: i32,
    },
    /// No sandbox or command of this id.
    Unknown,
}

/// Steps of starting a sandbox or a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum Step {
    /// Reading the request and its descriptors.
    Request,
    /// Making the process.
    Clone,
    /// Entering the cgroups.
    Cgroup,
    /// Writing the id maps.
    IdMap,
    /// Mapping layers' ids.
    LayerIdMap,
    /// Putting the layers together.
    Overlay,
    /// Changing to the mapped root.
    Identity,
    /// Attaching the root.
    Root,
    /// Mounting /proc.
    Proc,
    /// Mounting /sys.
    Sys,
    /// Mounting /dev.
    Dev,
    /// Hiding and binding files.
    Mask,
    /// Entering the new root.
    PivotRoot,
    /// Host name and hosts file.
    Names,
    /// Loopback.
    Network,
    /// Limits and affinity.
    Limits,
    /// Capabilities and no_new_privs.
    Privileges,
    /// The seccomp filter.
    Seccomp,
    /// Executing the program.
    Exec,
    /// Joining the sandbox's namespaces.
    Join,
    /// Changing to the working directory.
    WorkingDirectory,
    /// Standard streams.
    Streams,
    /// The process died before it had reported.
    Died,
}

impl Step {
    const ALL: [Self; 23] = [
        Self::Request,
        Self::Clone,
        Self::Cgroup,
        Self::IdMap,
        Self::LayerIdMap,
        Self::Overlay,
        Self::Identity,
        Self::Root,
        Self::Proc,
        Self::Sys,
        Self::Dev,
        Self::Mask,
        Self::PivotRoot,
        Self::Names,
        Self::Network,
        Self::Limits,
        Self::Privileges,
        Self::Seccomp,
        Self::Exec,
        Self::Join,
        Self::WorkingDirectory,
        Self::Streams,
        Self::Died,
    ];

    /// The step with this number.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }
}

/// A sandbox as the keeper sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxNotice {
    /// Its id.
    pub sandbox: SandboxId,
    /// Its first process.
    pub pid: i32,
    /// Wait status of the first process, once it has ended.
    pub exit: Option<Exit>,
}

/// A command as the keeper sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandNotice {
    /// In which sandbox.
    pub sandbox: SandboxId,
    /// Its id.
    pub command: CommandId,
    /// Its first process.
    pub pid: i32,
    /// Bytes so far of standard output, standard error, control.
    pub totals: [u64; 3],
    /// Bytes that could not be written to a log.
    pub lost: u64,
    /// How it ended; everything it had written itself is in the totals then.
    pub exit: Option<Exit>,
    /// Whether all its pipes are closed: nothing more will come.
    pub closed: bool,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Exit code.
    pub code: Option<i32>,
    /// Signal.
    pub signal: Option<i32>,
    /// CPU time, microseconds.
    pub cpu_us: u64,
    /// Largest resident set, KiB.
    pub peak_rss_kib: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_round_trip_by_number() {
        for (number, step) in Step::ALL.iter().enumerate() {
            assert_eq!(*step as usize, number);
            assert_eq!(Step::from_number(number as u8), Some(*step));
        }
        assert_eq!(Step::from_number(200), None);
    }
}
