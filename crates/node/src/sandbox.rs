//! One sandbox in memory: its record, what waits for it, its commands.
//!
//! Three locks, always taken in this order: `lifecycle` (one create, pause, resume or stop at a time), `gate` (starting
//! a process shares it, freezing takes it alone: a process that entered a frozen cgroup would never report), and the
//! short `inner` for the data.

use crate::commands::session::Session;
use crate::commands::{Command, KeptLogs};
use crate::ledger::SandboxRecord;
use corral_api::digest::Digest;
use corral_api::ids::{CommandId, SandboxId, SessionId};
use corral_api::sandbox::{EndStatus, SandboxStatus, State};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::{RwLock, watch};

/// What is said of the sandbox's progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pulse {
    /// State.
    pub state: State,
    /// Whether the first process has ended.
    pub dead: bool,
}

/// A sandbox that is not ended, or ended a moment ago.
#[derive(Debug)]
pub struct Sandbox {
    /// Its id.
    pub id: SandboxId,
    /// One create, pause, resume or stop at a time.
    pub lifecycle: tokio::sync::Mutex<()>,
    /// Shared by starts of processes, exclusive for freezing.
    pub gate: RwLock<()>,
    /// Tells every change of state.
    pub pulse: watch::Sender<Pulse>,
    /// Requests under way; the idle life counts from when there is none.
    active: AtomicU32,
    /// When the last request ended.
    last_active_ms: AtomicU64,
    inner: Mutex<Inner>,
}

/// The data behind the lock.
#[derive(Debug)]
pub struct Inner {
    /// What is persisted.
    pub record: SandboxRecord,
    /// First process on the host, once started.
    pub init: i32,
    /// Cores it runs on; empty = all.
    pub affinity: Vec<u16>,
    /// Why it is being stopped, while it is.
    pub ending: Option<EndStatus>,
    /// It is being rolled back: the end of its first process is not its own.
    pub rolling_back: bool,
    /// Kills for want of memory already accounted for.
    pub oom_seen: u64,
    /// Commands by id.
    pub commands: HashMap<CommandId, Arc<Command>>,
    /// Commands by step key, with the digest of their request.
    pub steps: HashMap<String, (Digest, CommandId)>,
    /// Output of ended commands.
    pub kept_logs: KeptLogs,
    /// Shell sessions.
    pub sessions: HashMap<SessionId, Arc<Session>>,
}

/// Counts a request as activity while it lives.
#[derive(Debug)]
pub struct Activity(Arc<Sandbox>);

impl Drop for Activity {
    fn drop(&mut self) {
        self.0.last_active_ms.store(crate::clock::now_ms(), Ordering::Relaxed);
        self.0.active.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Sandbox {
    /// A sandbox from its record.
    pub fn new(record: SandboxRecord, affinity: Vec<u16>) -> Self {
        let (pulse, _) = watch::channel(Pulse { state: record.state, dead: false });
        Self {
            id: record.id.clone(),
            lifecycle: tokio::sync::Mutex::new(()),
            gate: RwLock::new(()),
            pulse,
            active: AtomicU32::new(0),
            last_active_ms: AtomicU64::new(crate::clock::now_ms()),
            inner: Mutex::new(Inner {
                record,
                init: 0,
                affinity,
                ending: None,
                rolling_back: false,
                oom_seen: 0,
                commands: HashMap::new(),
                steps: HashMap::new(),
                kept_logs: KeptLogs::default(),
                sessions: HashMap::new(),
            }),
        }
    }

    /// The data.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// State now.
    pub fn state(&self) -> State {
        self.pulse.borrow().state
    }

    /// As callers see it.
    pub fn status(&self) -> SandboxStatus {
        self.lock().record.status()
    }

    /// Its record, with the end that is under way where none is recorded yet.
    pub fn record_with_end(&self) -> SandboxRecord {
        let inner = self.lock();
        let mut record = inner.record.clone();
        record.end = record.end.or_else(|| inner.ending.clone());
        record
    }

    /// Counts a request as activity.
    pub fn begin(self: &Arc<Self>) -> Activity {
        self.active.fetch_add(1, Ordering::Relaxed);
        Activity(self.clone())
    }

    /// Counts this moment as activity.
    pub fn touch(&self) {
        self.last_active_ms.store(crate::clock::now_ms(), Ordering::Relaxed);
    }

    /// How long there was no request; zero while there is one.
    pub fn idle_ms(&self, now_ms: u64) -> u64 {
        if self.active.load(Ordering::Relaxed) > 0 {
            return 0;
        }
        now_ms.saturating_sub(self.last_active_ms.load(Ordering::Relaxed))
    }

    /// The command of this id.
    pub fn command(&self, id: &CommandId) -> Option<Arc<Command>> {
        self.lock().commands.get(id).cloned()
    }

    /// Notes that the first process has ended.
    pub fn note_dead(&self) {
        self.pulse.send_modify(|p| p.dead = true);
    }

    /// Notes that there will be another first process.
    pub fn note_reborn(&self) {
        self.pulse.send_modify(|p| p.dead = false);
    }

    /// Waits until the first process has ended.
    pub async fn wait_dead(&self) {
        let mut pulse = self.pulse.subscribe();
        // The sender lives as long as the sandbox.
        let _seen = pulse.wait_for(|p| p.dead).await;
    }
}
