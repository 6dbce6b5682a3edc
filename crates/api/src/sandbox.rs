//! Sandboxes: what is asked for, what is observed, and the rules of their life.
//!
//! ```text
//! pending → starting → running ⇄ paused
//!    └─────────┴──────────┴────────┴──→ stopping → ended(reason)
//! ```
//! A rollback takes a running or paused sandbox through `starting` again.

use crate::command::{check_arguments, check_argv, check_env, truncated};
use crate::environment::{EnvironmentSpec, Limits, ResolvedEnvironment};
use crate::ids::{CommandId, SandboxId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Admitted, waiting for a start slot.
    Pending,
    /// Being made.
    Starting,
    /// Takes commands.
    Running,
    /// Frozen.
    Paused,
    /// Being taken down.
    Stopping,
    /// Gone; the record says why.
    Ended,
}

impl State {
    /// Whether the sandbox may go from this state to `next`.
    pub const fn may_become(self, next: Self) -> bool {
        use State::{Ended, Paused, Pending, Running, Starting, Stopping};
        matches!(
            (self, next),
            (Pending, Starting | Stopping | Ended)
                | (Starting, Running | Stopping | Ended)
                | (Running, Paused | Starting | Stopping | Ended)
                | (Paused, Running | Starting | Stopping | Ended)
                | (Stopping, Ended)
        )
    }
}

/// Why a sandbox ended. Readers accept reasons they do not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// A client stopped it.
    Stopped,
    /// No request for the idle time.
    IdleTtl,
    /// Its longest life was reached.
    MaxTtl,
    /// Its job ended.
    JobEnded,
    /// Memory was exhausted and its first process died of it.
    Oom,
    /// Its disk is full and it could not go on.
    DiskFull,
    /// Its first process ended.
    InitExited,
    /// The guest kernel panicked.
    KernelPanic,
    /// A policy ended it.
    PolicyViolation,
    /// The node made room.
    Evicted,
    /// A layer could not be had.
    ImageUnavailable,
    /// It could not be started.
    StartFailed,
    /// The host's storage failed.
    StorageError,
    /// The agent in the guest went silent.
    GuestAgentLost,
    /// The virtual machine monitor died.
    MonitorLost,
    /// The keeper died.
    KeeperLost,
    /// The host was started anew.
    HostRebooted,
    /// The node is gone.
    NodeLost,
    /// A reason of a later version.
    #[serde(other)]
    Unknown,
}

/// Who brought an event about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The program inside.
    Agent,
    /// The caller of the API.
    Client,
    /// The operator.
    Operator,
    /// Corral itself or its host.
    Platform,
}

impl EndReason {
    /// Who usually brings this end about.
    pub const fn cause(self) -> Cause {
        match self {
            Self::Stopped | Self::IdleTtl | Self::MaxTtl | Self::JobEnded => Cause::Client,
            Self::Oom | Self::DiskFull | Self::InitExited | Self::KernelPanic | Self::PolicyViolation => Cause::Agent,
            Self::Evicted => Cause::Operator,
            _ => Cause::Platform,
        }
    }

    /// Whether the platform failed, so that the sandbox's result should not be used.
    pub const fn is_infra_failure(self) -> bool {
        matches!(self.cause(), Cause::Platform)
    }
}

/// The end of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndStatus {
    /// Why.
    pub reason: EndReason,
    /// Who brought it about.
    pub cause: Cause,
    /// Whether the platform failed.
    pub infra_failed: bool,
    /// More, for a person.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

impl EndStatus {
    /// An end with the usual cause of its reason.
    pub fn new(reason: EndReason, message: impl Into<String>) -> Self {
        Self { reason, cause: reason.cause(), infra_failed: reason.is_infra_failure(), message: message.into() }
    }
}

/// Body of `POST /v1/sandboxes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SandboxSpec {
    /// Name of an environment or image. Either this or `spec`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub environment: Option<String>,
    /// An environment in place. Either this or `environment`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spec: Option<EnvironmentSpec>,
    /// Limits.
    pub limits: Limits,
    /// Variables for every command.
    pub env: BTreeMap<String, String>,
    /// What it starts with instead of the environment's entry point and its arguments. Empty: nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entrypoint: Option<Vec<String>>,
    /// Arguments of the entry point instead of the environment's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cmd: Option<Vec<String>>,
    /// Labels to find it by. Keys and values up to 128 bytes without control characters, 64 at most.
    pub labels: BTreeMap<String, String>,
    /// Host name inside; `sandbox` where empty.
    pub hostname: String,
    /// Ends after this long without a request. 0 = never.
    pub idle_ttl_ms: u64,
    /// Ends this long after its creation. 0 = never.
    pub max_ttl_ms: u64,
    /// Requests for commands and files resume it when it is paused.
    pub auto_resume: bool,
    /// Lets set-user-id programs such as sudo gain rights inside (no_new_privs stays off).
    pub allow_setuid: bool,
}

impl Default for SandboxSpec {
    fn default() -> Self {
        Self {
            environment: None,
            spec: None,
            limits: Limits::default(),
            env: BTreeMap::new(),
            entrypoint: None,
            cmd: None,
            labels: BTreeMap::new(),
            hostname: String::new(),
            idle_ttl_ms: 0,
            max_ttl_ms: 0,
            auto_resume: true,
            allow_setuid: false,
        }
    }
}

impl SandboxSpec {
    /// Refuses settings that cannot be honoured.
    ///
    /// # Errors
    /// A text that names the field and what it may be.
    pub fn check(&self) -> Result<(), String> {
        self.limits.check()?;
        if self.labels.len() > 64 {
            return Err(format!("{} labels: at most 64 are allowed", self.labels.len()));
        }
        for (key, value) in &self.labels {
            if key.is_empty() || key.len() > 128 || value.len() > 128 {
                return Err(format!("label {:?}: keys are 1–128 bytes, values up to 128", truncated(key)));
            }
            if key.chars().chain(value.chars()).any(char::is_control) {
                return Err(format!("label {:?}: keys and values hold no control characters", truncated(key)));
            }
        }
        check_env(&self.env)?;
        check_argv("entrypoint", self.entrypoint.as_deref().unwrap_or_default())?;
        check_arguments("cmd", self.cmd.as_deref().unwrap_or_default())?;
        let host_ok = self.hostname.len() <= 63
            && self.hostname.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !self.hostname.starts_with('-')
            && !self.hostname.ends_with('-');
        if !host_ok {
            return Err(format!(
                "hostname {:?}: letters, digits and inner dashes, up to 63",
                truncated(&self.hostname)
            ));
        }
        Ok(())
    }
}

/// What the gateway asks of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateOnNode {
    /// Whose it is.
    pub project_id: String,
    /// The caller's `Idempotency-Key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
    /// Digest over the caller's body, to tell a repeated create from another one under the same key.
    pub body_digest: crate::digest::Digest,
    /// Resolved environment.
    pub environment: ResolvedEnvironment,
    /// The caller's settings; its environment is resolved above.
    pub spec: SandboxSpec,
}

/// A sandbox as it is now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxStatus {
    /// Its id.
    pub id: SandboxId,
    /// Whose it is.
    pub project_id: String,
    /// State.
    pub state: State,
    /// Name of its environment.
    pub environment: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Limits.
    pub limits: Limits,
    /// Creation, RFC 3339.
    pub created_at: String,
    /// First moment in `running`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<String>,
    /// End.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<String>,
    /// Why it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<EndStatus>,
    /// Idle life in ms, 0 = unlimited.
    pub idle_ttl_ms: u64,
    /// Whole life in ms, 0 = unlimited.
    pub max_ttl_ms: u64,
    /// Whether requests resume it when it is paused.
    pub auto_resume: bool,
    /// The command it started with, where its environment has an entry point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrypoint_command_id: Option<CommandId>,
}

/// Body of `PUT /v1/sandboxes/{id}/ttl`: what is absent stays.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TtlUpdate {
    /// New idle life, from now. 0 = unlimited.
    #[serde(default)]
    pub idle_ttl_ms: Option<u64>,
    /// New whole life, counted from the creation. 0 = unlimited.
    #[serde(default)]
    pub max_ttl_ms: Option<u64>,
}

/// The disk of a sandbox as it was at one moment, kept on its node for as long as the sandbox lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Checkpoint {
    /// Its number, rising from 1.
    pub number: u32,
    /// When, RFC 3339.
    pub created_at: String,
    /// How long the sandbox stood still for it.
    pub frozen_us: u64,
}

/// The checkpoints of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CheckpointList {
    /// The checkpoints, oldest first.
    pub checkpoints: Vec<Checkpoint>,
}

/// Body of `POST /v1/sandboxes/{id}/rollback`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RollbackSpec {
    /// Number of the checkpoint.
    pub checkpoint: u32,
}

/// Body of `POST /v1/sandboxes/{id}/fork`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkSpec {
    /// How many, 1 to 256.
    #[serde(default = "one")]
    pub count: u32,
    /// Labels instead of the sandbox's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// The same key and body again return the same forks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
}

fn one() -> u32 {
    1
}

impl ForkSpec {
    /// Most forks of one request.
    pub const MOST: u32 = 256;

    /// Refuses what cannot be honoured.
    ///
    /// # Errors
    /// A text that names the field and what it may be.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=Self::MOST).contains(&self.count) {
            return Err(format!("count is {}: 1 to {}", self.count, Self::MOST));
        }
        // With room for the number of each fork.
        if self.idempotency_key.as_ref().is_some_and(|key| key.is_empty() || key.len() > 240) {
            return Err("idempotency_key: 1–240 bytes".to_owned());
        }
        Ok(())
    }
}

/// A page of sandboxes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxPage {
    /// The sandboxes, by id.
    pub sandboxes: Vec<SandboxStatus>,
    /// Give this as `cursor` for the next page; absent on the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// Use of resources by a sandbox, now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxStats {
    /// CPU time used since the start.
    pub cpu_ms: u64,
    /// Memory charged now.
    pub memory_bytes: u64,
    /// Highest memory charged so far.
    pub memory_peak_bytes: u64,
    /// Processes and threads.
    pub pids: u64,
    /// Bytes in the writable layer.
    pub disk_bytes: u64,
    /// Processes killed for want of memory.
    pub oom_kills: u64,
    /// Bytes that it asked for of layers that are read lazily. What the host has in memory is not asked for.
    #[serde(default)]
    pub read_bytes: u64,
    /// Bytes of layers that were fetched from the shared store because it read them.
    #[serde(default)]
    pub fetched_bytes: u64,
    /// Chunks of its layers that are read lazily; 0 where none is.
    #[serde(default)]
    pub image_chunks: u64,
    /// Of these, chunks that were read since the server of lazy reads was started, by this sandbox or another one that
    /// has the layer.
    #[serde(default)]
    pub image_touched_chunks: u64,
}

/// Something that happened to a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Sequence number on its node, rising by one from 1.
    pub seq: u64,
    /// When, RFC 3339.
    pub at: String,
    /// Which sandbox.
    pub sandbox_id: SandboxId,
    /// What.
    #[serde(flatten)]
    pub what: EventKind,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EventKind {
    /// The sandbox changed its state.
    State {
        /// The new state.
        state: State,
        /// For `ended`: why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        end: Option<EndStatus>,
    },
    /// A command began.
    CommandStarted {
        /// Which.
        command_id: CommandId,
    },
    /// A command ended.
    CommandEnded {
        /// Which.
        command_id: CommandId,
        /// How.
        outcome: crate::command::Outcome,
    },
    /// A process inside read data of a layer that could not be had from the shared store, and was told EIO.
    ReadFailed {
        /// The layer.
        layer: crate::digest::Digest,
        /// The command it belongs to, where that is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        command_id: Option<CommandId>,
        /// Who brought it about.
        cause: Cause,
        /// Why.
        message: String,
    },
}

/// A page of events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventPage {
    /// Events in order.
    pub events: Vec<Event>,
    /// Pass as `after` to go on.
    pub last_seq: u64,
    /// Whether events older than the first one here were dropped since `after`.
    pub gap: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_is_final_and_every_live_state_can_stop() {
        use State::*;
        for s in [Pending, Starting, Running, Paused, Stopping] {
            assert!(!Ended.may_become(s));
            assert!(s.may_become(Ended));
        }
        assert!(!Pending.may_become(Running));
        assert!(Paused.may_become(Running) && Running.may_become(Paused));
    }

    #[test]
    fn unknown_fields_and_reasons() {
        let read: EndReason = serde_json::from_str("\"melted\"").unwrap();
        assert_eq!(read, EndReason::Unknown);
        assert!(serde_json::from_str::<TtlUpdate>("{\"ttl\":1}").is_err());
    }

    #[test]
    fn bad_options_are_named() {
        let mut o = SandboxSpec::default();
        o.limits.pids = 0;
        assert!(o.check().unwrap_err().contains("limits.pids"));
        let o = SandboxSpec { hostname: "-a".into(), ..Default::default() };
        assert!(o.check().unwrap_err().contains("hostname"));
        for (key, value) in [("", ""), ("a\0", "b"), ("a", "b\0"), ("a", "b\nc"), ("a", "\u{1b}[2J"), ("a", "\u{85}")] {
            let o = SandboxSpec { labels: [(key.into(), value.into())].into(), ..Default::default() };
            assert!(o.check().unwrap_err().contains("label"), "{key:?} {value:?}");
        }
        for words in [vec![String::new()], vec!["a".to_owned(), "b\0".to_owned()]] {
            let o = SandboxSpec { entrypoint: Some(words), ..Default::default() };
            assert!(o.check().unwrap_err().contains("entrypoint"));
        }
        let o = SandboxSpec { entrypoint: Some(vec![]), cmd: Some(vec![String::new()]), ..Default::default() };
        assert_eq!(o.check(), Ok(()));
    }
}
