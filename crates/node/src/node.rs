//! The node's state, shared by everything that serves it.

use crate::ballast::Ballast;
use crate::cache::CacheState;
use crate::config::NodeConfig;
use crate::events::Events;
use crate::keepers::Keepers;
use crate::ledger::{Change, Ledger};
use crate::metrics::Metrics;
use crate::sandbox::Sandbox;
use corral_api::ids::{NodeId, SandboxId};
use corral_api::problem::{ErrorKind, Problem};
use corral_api::sandbox::{EventKind, State};
use corral_layers::{LayerStore, SharedLayers};
use corral_runtime::container::Containers;
use corral_runtime::keeper_link::KeeperLink;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use tokio::sync::Semaphore;

/// The node.
#[derive(Debug)]
pub struct Core {
    /// Its id.
    pub id: NodeId,
    /// What the operator set.
    pub config: NodeConfig,
    /// What must not be forgotten.
    pub ledger: Ledger,
    /// What happened.
    pub events: Events,
    /// The container backend.
    pub containers: Arc<Containers>,
    /// The keepers.
    pub keepers: Keepers,
    /// Layers.
    pub layers: LayerStore,
    /// The store that nodes share, where there is one.
    pub shared: Option<SharedLayers>,
    /// Data of layers that can be had again.
    pub cache: CacheState,
    /// The server of lazy reads, where layers are read as they are fetched.
    pub lazy: Option<Arc<crate::lazy::Lazy>>,
    /// The one that runs, which may be left from a run with other settings: sandboxes read through it.
    pub lazy_running: Option<Arc<crate::lazy::Lazy>>,
    /// Layers being fetched.
    pub fetching: crate::shared::Turns,
    /// Room on the disk for what runs.
    pub ballast: Ballast,
    /// Counters.
    pub metrics: Metrics,
    /// Cores of the host.
    pub cores: u16,
    /// Start slots.
    pub starts: Semaphore,
    /// Creates waiting for a start slot or started.
    pub queued: AtomicUsize,
    /// Teardowns at a time.
    pub removals: Semaphore,
    /// No new sandboxes are taken.
    pub draining: AtomicBool,
    /// Creates under way by idempotency key.
    pub creating: Mutex<HashMap<(String, String), (corral_api::digest::Digest, SandboxId)>>,
    sandboxes: RwLock<BTreeMap<SandboxId, Arc<Sandbox>>>,
    slots: Mutex<Slots>,
}

/// Ranges of host ids.
#[derive(Debug, Default)]
struct Slots {
    /// First number never used.
    next: u32,
    /// Given back.
    free: BTreeSet<u32>,
}

/// The parts a core is put together from.
#[derive(Debug)]
pub struct Parts {
    /// Its id.
    pub id: NodeId,
    /// What the operator set, `max_live` resolved.
    pub config: NodeConfig,
    /// The ledger.
    pub ledger: Ledger,
    /// The container backend.
    pub containers: Arc<Containers>,
    /// The keepers.
    pub keepers: Keepers,
    /// Layers.
    pub layers: LayerStore,
    /// The store that nodes share.
    pub shared: Option<SharedLayers>,
    /// The server of lazy reads.
    pub lazy: Option<Arc<crate::lazy::Lazy>>,
    /// The one that runs, used or not.
    pub lazy_running: Option<Arc<crate::lazy::Lazy>>,
    /// Number of the last event.
    pub last_event: u64,
}

impl Core {
    /// Puts a node together.
    pub fn new(parts: Parts) -> Self {
        let Parts { id, config, ledger, containers, keepers, layers, shared, lazy, lazy_running, last_event } = parts;
        Self {
            id,
            starts: Semaphore::new(config.start_slots),
            removals: Semaphore::new(config.start_slots),
            ballast: Ballast::new(&config.data_dir),
            cache: CacheState::new(config.cache_bytes, &config.data_dir),
            config,
            ledger,
            events: Events::after(last_event),
            containers,
            keepers,
            layers,
            shared,
            lazy,
            lazy_running,
            fetching: crate::shared::Turns::default(),
            metrics: Metrics::default(),
            cores: std::thread::available_parallelism().map_or(1, |n| n.get() as u16),
            queued: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            creating: Mutex::new(HashMap::new()),
            sandboxes: RwLock::new(BTreeMap::new()),
            slots: Mutex::new(Slots::default()),
        }
    }

    /// The sandbox of this id, if it is live.
    pub fn live(&self, id: &SandboxId) -> Option<Arc<Sandbox>> {
        self.read().get(id).cloned()
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<SandboxId, Arc<Sandbox>>> {
        self.sandboxes.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<SandboxId, Arc<Sandbox>>> {
        self.sandboxes.write().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The live sandbox of this id.
    ///
    /// # Errors
    /// 410 with its end when it has ended, 404 when there never was one.
    pub async fn find(self: &Arc<Self>, id: &SandboxId) -> Result<Arc<Sandbox>, Problem> {
        if let Some(sandbox) = self.live(id) {
            return Ok(sandbox);
        }
        match self.ended(id).await? {
            Some(record) => Err(ended_problem(&record)),
            None => Err(Problem::new(ErrorKind::NotFound, format!("no sandbox {id}")).sandbox(id)),
        }
    }

    /// The record of a sandbox that is not live, which is an ended one.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub async fn ended(self: &Arc<Self>, id: &SandboxId) -> Result<Option<crate::ledger::SandboxRecord>, Problem> {
        let of = id.clone();
        match self.read_ledger(move |ledger| ledger.sandbox(&of)).await? {
            Some(record) if record.state != State::Ended => {
                // Its end is on the way to the file.
                let id = id.clone();
                self.read_settled(move |ledger| ledger.sandbox(&id)).await
            }
            other => Ok(other),
        }
    }

    /// Reads the ledger with all that was posted before.
    ///
    /// # Errors
    /// When it cannot be written or read.
    pub async fn read_settled<T: Send + 'static>(
        self: &Arc<Self>,
        read: impl FnOnce(&Ledger) -> Result<T, crate::ledger::LedgerError> + Send + 'static,
    ) -> Result<T, Problem> {
        self.ledger.settle().await.map_err(|e| crate::error::ledger_problem(&e))?;
        self.read_ledger(read).await
    }

    /// Reads the ledger on a blocking thread.
    ///
    /// # Errors
    /// When it cannot be read.
    pub async fn read_ledger<T: Send + 'static>(
        self: &Arc<Self>,
        read: impl FnOnce(&Ledger) -> Result<T, crate::ledger::LedgerError> + Send + 'static,
    ) -> Result<T, Problem> {
        let this = self.clone();
        tokio::task::spawn_blocking(move || read(&this.ledger))
            .await
            .map_err(|_| Problem::new(ErrorKind::Internal, "reading the ledger failed"))?
            .map_err(|e| crate::error::ledger_problem(&e))
    }

    /// The connection to the keeper that holds a sandbox.
    ///
    /// # Errors
    /// When that keeper is lost.
    pub fn link_of(&self, sandbox: &Sandbox) -> Result<Arc<KeeperLink>, Problem> {
        let index = sandbox.lock().record.keeper;
        let keeper = self.keepers.get(index).ok_or_else(|| Problem::new(ErrorKind::Internal, "no such keeper"))?;
        keeper.connected()
    }

    /// All live sandboxes, by id.
    pub fn all(&self) -> Vec<Arc<Sandbox>> {
        self.read().values().cloned().collect()
    }

    /// How many are live.
    pub fn live_count(&self) -> u64 {
        self.read().len() as u64
    }

    /// Takes a sandbox in, if there is room.
    ///
    /// # Errors
    /// The number that are live, when that is the most allowed.
    pub fn insert(&self, sandbox: Arc<Sandbox>) -> Result<(), u64> {
        let mut all = self.write();
        if all.len() as u64 >= self.config.max_live {
            return Err(all.len() as u64);
        }
        all.insert(sandbox.id.clone(), sandbox);
        Ok(())
    }

    /// Takes in one that was adopted, whatever the limit.
    pub fn insert_adopted(&self, sandbox: Arc<Sandbox>) {
        self.write().insert(sandbox.id.clone(), sandbox);
    }

    /// Takes a sandbox out.
    pub fn remove(&self, id: &SandboxId) {
        self.write().remove(id);
    }

    fn lock_slots(&self) -> std::sync::MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// A range of host ids that no live sandbox has.
    pub fn take_slot(&self) -> Option<u32> {
        let mut slots = self.lock_slots();
        if let Some(slot) = slots.free.pop_first() {
            return Some(slot);
        }
        (slots.next < corral_runtime::container::MAX_SLOTS).then(|| {
            slots.next += 1;
            slots.next - 1
        })
    }

    /// Marks ranges as used, at the start.
    pub fn reserve_slots(&self, used: &BTreeSet<u32>) {
        let mut slots = self.lock_slots();
        slots.next = used.last().map_or(0, |last| last + 1);
        slots.free = (0..slots.next).filter(|s| !used.contains(s)).collect();
    }

    /// Gives a range back.
    pub fn give_slot(&self, slot: u32) {
        self.lock_slots().free.insert(slot);
    }

    /// Directory of a sandbox's logs.
    pub fn log_dir(&self, id: &SandboxId) -> PathBuf {
        self.config.data_dir.join("logs").join(id.as_str())
    }

    /// Changes a sandbox's state, its record, and tells it.
    pub fn set_state(&self, sandbox: &Sandbox, state: State) {
        let (record, end) = {
            let mut inner = sandbox.lock();
            debug_assert!(inner.record.state.may_become(state), "{:?} → {state:?}", inner.record.state);
            inner.record.state = state;
            let now = crate::clock::now_ms();
            match state {
                State::Running if inner.record.started_ms.is_none() => inner.record.started_ms = Some(now),
                State::Ended => {
                    inner.record.ended_ms = Some(now);
                    inner.record.end = inner.ending.clone();
                }
                _ => {}
            }
            (inner.record.clone(), inner.record.end.clone())
        };
        let what = EventKind::State { state, end };
        self.events.record(&self.ledger, &sandbox.id, what, vec![Change::Sandbox(Box::new(record))]);
        sandbox.pulse.send_modify(|p| p.state = state);
    }

    /// What a request that failed is told: where its sandbox is ending, that, whatever broke first.
    pub fn judge(&self, sandbox: &Sandbox, problem: Problem) -> Problem {
        let is_own = matches!(problem.kind, ErrorKind::InvalidRequest | ErrorKind::IdempotencyMismatch);
        if is_own || !crate::commands::is_ending(sandbox) || sandbox.lock().rolling_back {
            return problem.sandbox(&sandbox.id);
        }
        ended_problem(&sandbox.record_with_end())
    }

    /// Whether new sandboxes are taken.
    pub fn is_accepting(&self) -> bool {
        !self.draining.load(Ordering::Relaxed)
    }
}

/// What a request to an ended sandbox is told.
pub fn ended_problem(record: &crate::ledger::SandboxRecord) -> Problem {
    let why = record.end.as_ref().map_or_else(String::new, |e| {
        let reason = serde_json::to_string(&e.reason).unwrap_or_default();
        format!(": {}", reason.trim_matches('"'))
    });
    let mut problem =
        Problem::new(ErrorKind::SandboxEnded, format!("sandbox {} has ended{why}", record.id)).sandbox(&record.id);
    problem.infra_failed = record.end.as_ref().is_some_and(|e| e.infra_failed);
    problem
}
