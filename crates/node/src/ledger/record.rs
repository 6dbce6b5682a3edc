//! Records of the ledger, versioned: fields are only ever added, with defaults.

use corral_api::command::{CommandStatus, DEFAULT_OUTPUT_BYTES, Outcome, StreamStatus, Usage};
use corral_api::digest::Digest;
use corral_api::environment::ResolvedEnvironment;
use corral_api::ids::{CommandId, SandboxId, SessionId};
use corral_api::sandbox::{Cause, Checkpoint, EndStatus, SandboxSpec, SandboxStatus, State};
use corral_keeper::log;
use corral_keeper::protocol::LogBounds;
use serde::{Deserialize, Serialize};

/// A sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SandboxRecord {
    /// Its id.
    pub id: SandboxId,
    /// Whose it is.
    pub project_id: String,
    /// State when it was written.
    pub state: State,
    /// Range of host ids.
    pub slot: u32,
    /// Which keeper holds it.
    pub keeper: usize,
    /// Its environment.
    pub environment: ResolvedEnvironment,
    /// The caller's settings.
    pub spec: SandboxSpec,
    /// The command it starts with, where its environment has an entry point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrypoint: Option<CommandId>,
    /// Its checkpoints, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<Checkpoint>,
    /// Name of the last snapshot of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_snapshot: Option<String>,
    /// Creation.
    pub created_ms: u64,
    /// First time it ran.
    #[serde(default)]
    pub started_ms: Option<u64>,
    /// End.
    #[serde(default)]
    pub ended_ms: Option<u64>,
    /// Why it ended.
    #[serde(default)]
    pub end: Option<EndStatus>,
}

impl SandboxRecord {
    /// As callers see it.
    pub fn status(&self) -> SandboxStatus {
        SandboxStatus {
            id: self.id.clone(),
            project_id: self.project_id.clone(),
            state: self.state,
            environment: self.environment.name.clone(),
            labels: self.spec.labels.clone(),
            limits: self.spec.limits,
            created_at: crate::clock::rfc3339(self.created_ms),
            started_at: self.started_ms.map(crate::clock::rfc3339),
            ended_at: self.ended_ms.map(crate::clock::rfc3339),
            end: self.end.clone(),
            idle_ttl_ms: self.spec.idle_ttl_ms,
            max_ttl_ms: self.spec.max_ttl_ms,
            auto_resume: self.spec.auto_resume,
            // Its command exists from the moment it runs.
            entrypoint_command_id: self.started_ms.and_then(|_| self.entrypoint.clone()),
        }
    }
}

/// A command: written before it is started, and again when it has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandRecord {
    /// In which sandbox.
    pub sandbox: SandboxId,
    /// Its id.
    pub id: CommandId,
    /// The session it ran in, or whose shell it is.
    #[serde(default)]
    pub session: Option<SessionId>,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// The caller's step key.
    #[serde(default)]
    pub step_key: Option<String>,
    /// Over the caller's request, to tell a repeated step from another.
    pub body: Digest,
    /// Bounds of its logs.
    pub head_bytes: u64,
    /// Bounds of its logs.
    pub tail_bytes: u64,
    /// Whether it is a session's shell.
    #[serde(default)]
    pub is_shell: bool,
    /// For a command of a session: the shell whose logs hold its output, and where in them.
    #[serde(default)]
    pub within: Option<Within>,
    /// Its limit, 0 = none.
    pub timeout_ms: u64,
    /// Start.
    pub started_ms: u64,
    /// End.
    #[serde(default)]
    pub ended_ms: Option<u64>,
    /// How it ended.
    #[serde(default)]
    pub end: Option<Outcome>,
    /// Bytes of standard output and error.
    #[serde(default)]
    pub totals: [u64; 2],
    /// Resources.
    #[serde(default)]
    pub usage: Option<Usage>,
    /// Data of a layer could not be had for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_failed: bool,
    /// Its output was dropped, since the sandbox's commands wrote more than is kept.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub output_gone: bool,
}

/// Where in a shell's logs a session command's output lies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Within {
    /// The shell.
    pub shell: CommandId,
    /// First byte in standard output and error.
    pub from: [u64; 2],
    /// First byte on the control pipe.
    #[serde(default)]
    pub control: u64,
}

/// Bounds of a command's logs where none are asked for; those of a session's shell.
pub const DEFAULT_BOUNDS: LogBounds =
    LogBounds { head_bytes: DEFAULT_OUTPUT_BYTES / 2, tail_bytes: DEFAULT_OUTPUT_BYTES / 2 };

impl CommandRecord {
    /// A command that begins now, without limit or settings of its own.
    pub fn new(sandbox: SandboxId, id: CommandId, argv: Vec<String>, body: Digest) -> Self {
        Self {
            sandbox,
            id,
            session: None,
            argv,
            step_key: None,
            body,
            head_bytes: DEFAULT_BOUNDS.head_bytes,
            tail_bytes: DEFAULT_BOUNDS.tail_bytes,
            is_shell: false,
            within: None,
            timeout_ms: 0,
            started_ms: crate::clock::now_ms(),
            ended_ms: None,
            end: None,
            totals: [0; 2],
            usage: None,
            read_failed: false,
            output_gone: false,
        }
    }

    /// Bounds of its logs.
    pub fn bounds(&self) -> LogBounds {
        LogBounds { head_bytes: self.head_bytes, tail_bytes: self.tail_bytes }
    }

    /// The range of a stream of `total` bytes that is not kept; empty when all is.
    pub fn dropped(&self, total: u64) -> (u64, u64) {
        match &self.within {
            _ if self.output_gone => (0, total),
            // A session's shell has one log for all its commands; what it dropped shows in the read itself.
            Some(_) => (total, total),
            None => log::dropped(self.bounds(), total),
        }
    }

    /// Who is to blame where it failed, as far as that is known.
    fn cause(&self) -> Option<Cause> {
        let failed = self.end.as_ref().is_some_and(|end| *end != Outcome::Exited { code: 0 });
        (self.read_failed && failed).then_some(Cause::Platform)
    }

    /// As callers see it, with these totals.
    pub fn status(&self, totals: [u64; 2]) -> CommandStatus {
        let stream = |total: u64| {
            let (from, to) = self.dropped(total);
            StreamStatus { total_bytes: total, truncated: from != to, dropped_from: from, dropped_to: to }
        };
        CommandStatus {
            id: self.id.clone(),
            session_id: self.session.clone(),
            argv: self.argv.clone(),
            step_key: self.step_key.clone(),
            running: self.end.is_none(),
            end: self.end.clone(),
            cause: self.cause(),
            stdout: stream(totals[0]),
            stderr: stream(totals[1]),
            usage: self.usage,
            started_at: crate::clock::rfc3339(self.started_ms),
            ended_at: self.ended_ms.map(crate::clock::rfc3339),
        }
    }
}
