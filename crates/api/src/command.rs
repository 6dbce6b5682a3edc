//! Commands, their results and shell sessions.

use crate::ids::{CommandId, SessionId};
use crate::sandbox::Cause;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Bytes kept of each output stream unless the request says otherwise: half from its head, half from its tail.
pub const DEFAULT_OUTPUT_BYTES: u64 = 16 << 20;
/// The most that may be asked to be kept of one stream.
pub const MAX_OUTPUT_BYTES: u64 = 4 << 30;

/// Body of `POST /v1/sandboxes/{id}/exec`. Exactly one of `argv` and `shell` is given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ExecSpec {
    /// Program and arguments; the program is looked up in `PATH`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub argv: Vec<String>,
    /// A command line for `/bin/sh -c`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
    /// Variables over those of the sandbox.
    pub env: BTreeMap<String, String>,
    /// Working directory instead of the environment's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// `user`, `uid`, `user:group` or `uid:gid` instead of the environment's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Text for standard input, which is then closed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
    /// Keep standard input open for `POST …/commands/{command_id}/stdin`. Without this and `stdin` it is empty.
    pub open_stdin: bool,
    /// Kill everything the command started after this long. 0 = no limit.
    pub timeout_ms: u64,
    /// Answer at once with the running command instead of its result.
    pub background: bool,
    /// The same key again returns the recorded result; the command never runs twice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_key: Option<String>,
    /// Bytes kept of each stream; 0 = the default.
    pub max_output_bytes: u64,
    /// Write standard error into standard output.
    pub merge_stderr: bool,
}

/// Refuses a program and arguments that no process can be given. An empty list is for the caller to judge.
///
/// # Errors
/// A text that begins with `name`.
pub fn check_argv(name: &str, argv: &[String]) -> Result<(), String> {
    if argv.first().is_some_and(String::is_empty) {
        return Err(format!("{name}: the program is empty"));
    }
    check_arguments(name, argv)
}

/// Refuses arguments that no process can be given.
///
/// # Errors
/// A text that begins with `name`.
pub fn check_arguments(name: &str, arguments: &[String]) -> Result<(), String> {
    if arguments.iter().any(|a| a.contains('\0')) {
        return Err(format!("{name}: an argument holds a NUL byte"));
    }
    Ok(())
}

/// Refuses variables that no process can be given.
///
/// # Errors
/// A text that names the variable.
pub fn check_env(env: &BTreeMap<String, String>) -> Result<(), String> {
    for (key, value) in env {
        if key.is_empty() || key.contains(['=', '\0']) || value.contains('\0') {
            return Err(format!("environment variable {:?}: empty name, '=' or NUL", truncated(key)));
        }
    }
    Ok(())
}

pub(crate) fn truncated(text: &str) -> String {
    text.chars().take(80).collect()
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// It exited.
    Exited {
        /// Exit code.
        code: i32,
    },
    /// A signal ended it.
    Signaled {
        /// Signal number.
        signal: i32,
        /// Signal name, such as `SIGKILL`.
        name: String,
        /// The kernel killed it because the sandbox's memory was used up.
        oom: bool,
    },
    /// It reached its limit and was killed with everything it started.
    TimedOut {
        /// The limit.
        timeout_ms: u64,
    },
    /// The sandbox ended first.
    SandboxEnded,
    /// The sandbox was rolled back to a checkpoint, which ended all its processes.
    RolledBack,
    /// What became of it cannot be known after a crash; it was not run again.
    OutcomeUnknown,
    /// It could not be started: nothing of it ever ran.
    NotStarted {
        /// Why not.
        message: String,
    },
}

impl Outcome {
    /// The exit status a shell would report: the code, or 128 + signal; 124 for a timeout; 125 where there is none.
    pub fn shell_status(&self) -> i32 {
        match self {
            Self::Exited { code } => *code,
            Self::Signaled { signal, .. } => 128 + signal,
            Self::TimedOut { .. } => 124,
            Self::SandboxEnded | Self::RolledBack | Self::OutcomeUnknown | Self::NotStarted { .. } => 125,
        }
    }
}

/// Output of one stream.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StreamStatus {
    /// Bytes written by the command so far, kept or not.
    pub total_bytes: u64,
    /// Whether bytes between head and tail were dropped.
    pub truncated: bool,
    /// First dropped offset (equals `dropped_to` when none).
    pub dropped_from: u64,
    /// First kept offset after the gap.
    pub dropped_to: u64,
}

/// Resources used by a command's first process and the children it waited for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    /// CPU time, user and system.
    pub cpu_ms: u64,
    /// Largest resident set.
    pub peak_memory_bytes: u64,
    /// Time from start to end.
    pub wall_ms: u64,
}

/// A command as it is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommandStatus {
    /// Its id.
    pub id: CommandId,
    /// The session it ran in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// The step key it was sent with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_key: Option<String>,
    /// Whether it still runs.
    pub running: bool,
    /// How it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<Outcome>,
    /// `platform` where it failed after the platform had failed it: data of a layer could not be had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<Cause>,
    /// Standard output so far.
    pub stdout: StreamStatus,
    /// Standard error so far.
    pub stderr: StreamStatus,
    /// Resources, once ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// Start, RFC 3339.
    pub started_at: String,
    /// End, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<String>,
}

/// Result of a foreground command. Bytes that are not UTF-8 come as base64.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecResult {
    /// The command.
    pub command: CommandStatus,
    /// Exit status as a shell reports it; see `command.end` for the details.
    pub exit_code: i32,
    /// What was kept of standard output, up to `inline_limit_bytes`.
    pub stdout: OutputText,
    /// What was kept of standard error, up to `inline_limit_bytes`.
    pub stderr: OutputText,
}

/// Most bytes of a stream put into an `ExecResult`; the rest is read from the log by offset.
pub const INLINE_OUTPUT_BYTES: u64 = 4 << 20;

/// Output inside JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OutputText {
    /// The text, when it is UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The bytes in base64, when they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base64: Option<String>,
    /// Whether this holds every byte the command wrote.
    pub complete: bool,
}

/// A line of `POST …/exec?stream=true` (`application/x-ndjson`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ExecEvent {
    /// It runs.
    Started {
        /// The command.
        command_id: CommandId,
    },
    /// Bytes of a stream.
    Output {
        /// `stdout` or `stderr`.
        stream: StreamName,
        /// Offset of the first byte.
        offset: u64,
        /// The bytes in base64.
        base64: String,
    },
    /// It ended; the last line.
    Ended {
        /// Its final status.
        command: CommandStatus,
    },
    /// The stream broke off; the last line.
    Failed {
        /// Why.
        problem: crate::problem::Problem,
    },
}

/// An output stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum StreamName {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Body of `POST …/commands/{command_id}/signal`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignalRequest {
    /// Name (`SIGTERM`, `TERM`) or number.
    pub signal: String,
    /// Send it to everything the command started, not its first process alone.
    #[serde(default)]
    pub tree: bool,
}

/// Body of `POST …/sessions`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SessionSpec {
    /// The shell; `/bin/bash` where the image has it, else `/bin/sh`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
    /// Variables over those of the sandbox.
    pub env: BTreeMap<String, String>,
    /// First working directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// A shell session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SessionStatus {
    /// Its id.
    pub id: SessionId,
    /// The shell's command.
    pub command_id: CommandId,
    /// Whether it takes commands.
    pub open: bool,
}

/// Body of `POST …/sessions/{session_id}/run`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SessionRun {
    /// Shell text.
    pub command: String,
    /// Kill what the command started after this long; the session lives on where its shell does. 0 = no limit.
    pub timeout_ms: u64,
    /// The same key again returns the recorded result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_key: Option<String>,
}

/// Control message of the PTY WebSocket (text frames; binary frames are terminal bytes).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum PtyMessage {
    /// Client to server: the window has another size.
    Resize {
        /// Columns.
        cols: u16,
        /// Rows.
        rows: u16,
    },
    /// Server to client: the command that runs on the terminal, sent first.
    Started {
        /// Its id, to come back to with `?command_id=…&offset=…`.
        command_id: CommandId,
    },
    /// Server to client: it ended; the last message.
    Ended {
        /// How.
        outcome: Outcome,
        /// Exit status as a shell reports it.
        exit_code: i32,
    },
}
