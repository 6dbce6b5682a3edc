//! Create: admission, intent in the ledger, start in the keeper.

use crate::commands::Entrypoint;
use crate::error::runtime_problem;
use crate::ledger::{Change, SandboxRecord};
use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::digest::Digest;
use corral_api::ids::{CommandId, SandboxId};
use corral_api::problem::{ErrorKind, Problem};
use corral_api::sandbox::{CreateOnNode, EndReason, EndStatus, EventKind, SandboxStatus, State};
use corral_runtime::container::ContainerSpec;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use tokio::sync::RwLockWriteGuard;

/// A full disk is not emptied at once.
const DISK_RETRY_AFTER_MS: u64 = 5000;

/// No cores in particular.
pub const AFFINITY_NONE: Vec<u16> = Vec::new();

/// A create as it was answered.
#[derive(Debug)]
pub struct Created {
    /// The sandbox.
    pub status: SandboxStatus,
    /// Whether it was there already, under the same idempotency key.
    pub repeated: bool,
}

impl Core {
    /// Creates a sandbox, or returns the one made before under the same idempotency key.
    ///
    /// # Errors
    /// A refusal of admission, bad settings, or why it could not be started; nothing is left then.
    pub async fn create(self: &Arc<Self>, request: CreateOnNode) -> Result<Created, Problem> {
        self.create_from(request, None).await
    }

    /// As [`Self::create`], with a writable layer that begins as a snapshot.
    ///
    /// # Errors
    /// As `create`.
    pub(super) async fn create_from(
        self: &Arc<Self>,
        request: CreateOnNode,
        from: Option<String>,
    ) -> Result<Created, Problem> {
        let begun = Instant::now();
        // Not cancel-safe, and the caller may hang up: it goes on in a task of its own.
        let this = self.clone();
        let created = tokio::spawn(async move { this.create_once(request, from).await })
            .await
            .unwrap_or_else(|_| Err(Problem::new(ErrorKind::Internal, "the create failed unexpectedly")));
        crate::metrics::Metrics::count(&self.metrics.creates, &created);
        if created.as_ref().is_ok_and(|c| !c.repeated) {
            self.metrics.create_seconds.observe(begun.elapsed().as_secs_f64());
        }
        created
    }

    async fn create_once(self: &Arc<Self>, request: CreateOnNode, from: Option<String>) -> Result<Created, Problem> {
        request.spec.check().map_err(|text| Problem::new(ErrorKind::InvalidRequest, text))?;
        let id = SandboxId::new(&self.id);
        let key = request.idempotency_key.clone().map(|key| (request.project_id.clone(), key));
        let Some(key) = key else {
            return self.admit(id, request, from).await;
        };
        match self.reserve(&key, request.body_digest, &id).await? {
            Some(first) => self.repeat(&first).await,
            None => {
                let result = self.admit(id, request, from).await;
                // The ledger answers for the key from here on; a refused create may be tried again under it.
                self.lock_creating().remove(&key);
                result
            }
        }
    }

    fn lock_creating(
        &self,
    ) -> std::sync::MutexGuard<'_, std::collections::HashMap<(String, String), (Digest, SandboxId)>> {
        self.creating.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Reserves an idempotency key, or tells whose it is.
    async fn reserve(
        self: &Arc<Self>,
        key: &(String, String),
        body: Digest,
        id: &SandboxId,
    ) -> Result<Option<SandboxId>, Problem> {
        let mismatch = || {
            let text = format!("idempotency key {:?} was used with another body", key.1);
            Problem::new(ErrorKind::IdempotencyMismatch, text)
        };
        let known = {
            let mut creating = self.lock_creating();
            let known = creating.get(key).cloned();
            if known.is_none() {
                creating.insert(key.clone(), (body, id.clone()));
            }
            known
        };
        let known = match known {
            Some(known) => Some(known),
            None => {
                let recorded = self.recorded(key).await;
                if !matches!(recorded, Ok(None)) {
                    self.lock_creating().remove(key);
                }
                recorded?
            }
        };
        match known {
            Some((first_body, _)) if first_body != body => Err(mismatch()),
            Some((_, first)) => Ok(Some(first)),
            None => Ok(None),
        }
    }

    /// Whose an idempotency key is by the ledger. One that was refused, or cut off by a restart, never ran: its key is
    /// free for another try.
    async fn recorded(self: &Arc<Self>, key: &(String, String)) -> Result<Option<(Digest, SandboxId)>, Problem> {
        let (project, name) = key.clone();
        let Some((body, first)) = self.read_ledger(move |ledger| ledger.key(&project, &name)).await? else {
            return Ok(None);
        };
        let never_ran = |r: SandboxRecord| r.state == State::Ended && r.started_ms.is_none();
        if self.live(&first).is_none() && self.ended(&first).await?.is_some_and(never_ran) {
            return Ok(None);
        }
        Ok(Some((body, first)))
    }

    /// Answers a repeated create with the first one's sandbox, once that runs or has ended.
    async fn repeat(self: &Arc<Self>, first: &SandboxId) -> Result<Created, Problem> {
        if let Some(sandbox) = self.live(first) {
            let mut pulse = sandbox.pulse.subscribe();
            // The sender lives as long as the sandbox.
            let decided = |s| matches!(s, State::Running | State::Paused | State::Ended);
            let _seen = pulse.wait_for(|p| decided(p.state)).await;
            return Ok(Created { status: sandbox.status(), repeated: true });
        }
        match self.ended(first).await? {
            Some(record) => Ok(Created { status: record.status(), repeated: true }),
            // The first one is between its reservation and its admission, or was refused.
            None => Err(Problem::new(ErrorKind::Unavailable, "the first create under this key is not decided yet")
                .retry_after_ms(200)),
        }
    }

    async fn admit(
        self: &Arc<Self>,
        id: SandboxId,
        request: CreateOnNode,
        from: Option<String>,
    ) -> Result<Created, Problem> {
        let place = Place::take(self)?;
        self.check_room(&request)?;
        let slot = self.take_slot().ok_or_else(|| overloaded("every range of user ids is in use"))?;
        let keeper = self.keepers.choose();
        let affinity = self.choose_cores(request.spec.limits.cpus);
        let now = crate::clock::now_ms();
        let record = SandboxRecord {
            id: id.clone(),
            project_id: request.project_id.clone(),
            state: State::Pending,
            slot,
            keeper: keeper.index,
            entrypoint: request.environment.config.startup().map(|_| CommandId::random()),
            environment: request.environment,
            spec: request.spec,
            checkpoints: Vec::new(),
            last_snapshot: None,
            created_ms: now,
            started_ms: None,
            ended_ms: None,
            end: None,
        };
        let sandbox = Arc::new(Sandbox::new(record.clone(), affinity));
        let lifecycle = sandbox.lifecycle.lock().await;
        if let Err(live) = self.insert(sandbox.clone()) {
            keeper.live.fetch_sub(1, Ordering::Relaxed);
            self.give_slot(slot);
            return Err(overloaded(&format!("{live} sandboxes are live, the most this node takes")));
        }
        let mut changes = vec![Change::Sandbox(Box::new(record))];
        if let Some(key) = request.idempotency_key {
            let body = request.body_digest;
            changes.push(Change::Key { project: request.project_id, key, body, sandbox: id.clone(), at_ms: now });
        }
        self.events.record(&self.ledger, &id, EventKind::State { state: State::Pending, end: None }, changes);

        let started = self.start(&sandbox, from, None).await;
        drop(lifecycle);
        drop(place);
        match started {
            Ok(()) => Ok(Created { status: sandbox.status(), repeated: false }),
            Err(problem) => {
                let reason = match problem.kind {
                    ErrorKind::NotFound | ErrorKind::DigestMismatch => EndReason::ImageUnavailable,
                    ErrorKind::StorageError => EndReason::StorageError,
                    _ => EndReason::StartFailed,
                };
                self.end(&sandbox, EndStatus::new(reason, problem.message.clone())).await;
                Err(problem.sandbox(&id))
            }
        }
    }

    /// Starts an admitted sandbox, or again one that was rolled back, with a writable layer that begins as `from`.
    pub(super) async fn start(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        from: Option<String>,
        alone: Option<RwLockWriteGuard<'_, ()>>,
    ) -> Result<(), Problem> {
        let _slot = self.starts.acquire().await.map_err(|_| overloaded("the node is ending"))?;
        self.set_state(sandbox, State::Starting);
        // The intent is in the ledger before anything of the sandbox exists.
        self.ledger.settle().await.map_err(|e| crate::error::ledger_problem(&e))?;
        let (record, affinity) = {
            let inner = sandbox.lock();
            (inner.record.clone(), inner.affinity.clone())
        };
        self.ensure_layers(&record.environment.layers, &crate::lazy::class_of(&record.spec.labels)).await?;
        let layers = self.open_layers(&record.environment.layers).await?;
        let keeper = self.keepers.get(record.keeper).ok_or_else(|| overloaded("its keeper is gone"))?;
        let link = self.keepers.ensure(keeper).await.map_err(|e| runtime_problem(&e))?;
        let spec = ContainerSpec {
            id: sandbox.id.clone(),
            slot: record.slot,
            layers,
            limits: record.spec.limits,
            hostname: record.spec.hostname,
            affinity,
            allow_setuid: record.spec.allow_setuid,
            from,
        };
        let started = tokio::select! {
            started = self.containers.create(&link, spec) => started,
            // What it does of this when it goes on is removed by the end that follows here.
            () = keeper.until_stuck() => Err(corral_runtime::RuntimeError::Refused("the keeper does not answer".into())),
        };
        let started = started.map_err(|e| start_problem(&e, keeper))?;
        sandbox.lock().init = started.pid;
        if sandbox.pulse.borrow().dead {
            return Err(Problem::new(ErrorKind::Internal, "the first process died at once"));
        }
        let entrypoint = Entrypoint::enlist(sandbox);
        self.set_state(sandbox, State::Running);
        sandbox.touch();
        drop(alone);
        if let Some(entrypoint) = entrypoint {
            self.start_entrypoint(sandbox, entrypoint).await;
        }
        Ok(())
    }

    async fn open_layers(self: &Arc<Self>, digests: &[Digest]) -> Result<Vec<std::os::fd::OwnedFd>, Problem> {
        let (this, digests) = (self.clone(), digests.to_vec());
        let opened = tokio::task::spawn_blocking(move || {
            digests.iter().map(|d| this.layers.open_lower(d)).collect::<Result<Vec<_>, _>>()
        });
        opened.await.map_err(|_| Problem::new(ErrorKind::Internal, "opening the layers failed"))?.map_err(|e| {
            tracing::warn!(error = %crate::error::chain(&e), "a layer cannot be mounted");
            Problem::new(e.kind(), e.to_string())
        })
    }

    fn check_room(&self, request: &CreateOnNode) -> Result<(), Problem> {
        if !self.is_accepting() {
            return Err(Problem::new(ErrorKind::Unavailable, "the node is draining").retry_after_ms(1000));
        }
        let limits = &request.spec.limits;
        if limits.cpus > f64::from(self.cores) {
            let text = format!("limits.cpus is {}: this node has {} cores", limits.cpus, self.cores);
            return Err(Problem::new(ErrorKind::InvalidRequest, text));
        }
        let memory = crate::upkeep::memory();
        if u64::from(limits.memory_mib) << 20 > memory.total_bytes {
            let text =
                format!("limits.memory_mib is {}: this node has {} MiB", limits.memory_mib, memory.total_bytes >> 20);
            return Err(Problem::new(ErrorKind::InvalidRequest, text));
        }
        let most_files = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum.unwrap_or(u64::MAX);
        if u64::from(limits.open_files) > most_files {
            let text = format!("limits.open_files is {}: this node may give {most_files}", limits.open_files);
            return Err(Problem::new(ErrorKind::InvalidRequest, text));
        }
        let host = rustix::fs::statvfs(&self.config.data_dir).map_or(u64::MAX, |s| s.f_blocks * s.f_frsize);
        if u64::from(limits.disk_mib) << 20 > host {
            let text = format!("limits.disk_mib is {}: this node's disk has {} MiB", limits.disk_mib, host >> 20);
            return Err(Problem::new(ErrorKind::InvalidRequest, text));
        }
        if memory.available_bytes < self.config.memory_floor_mib << 20 {
            return Err(overloaded("the host has too little memory available"));
        }
        if crate::ballast::free_bytes(&self.config.data_dir.join("ledger.db")) < crate::ballast::CREATE_FLOOR {
            let text = "the disk of the node is full";
            return Err(Problem::new(ErrorKind::InsufficientStorage, text).retry_after_ms(DISK_RETRY_AFTER_MS));
        }
        let space = self.containers.writable().space();
        if space.free_bytes < self.config.writable.low_water_bytes {
            let grown = self.containers.writable().ensure_room();
            grown.map_err(|e| runtime_problem(&e).retry_after_ms(DISK_RETRY_AFTER_MS))?;
        }
        Ok(())
    }
}

fn start_problem(error: &corral_runtime::RuntimeError, keeper: &crate::keepers::Keeper) -> Problem {
    use corral_keeper::protocol::Step;
    match error {
        // Nothing of the caller's runs at this point: whatever failed is the platform's.
        corral_runtime::RuntimeError::Start { step: step @ (Step::Exec | Step::WorkingDirectory), errno } => {
            let reason = std::io::Error::from_raw_os_error(*errno);
            Problem::new(ErrorKind::Internal, format!("starting failed at step {step:?}: {reason}"))
        }
        corral_runtime::RuntimeError::Start { errno: libc::EMFILE, .. } => {
            keeper.note_crowded();
            overloaded("a keeper has no descriptors left")
        }
        other => runtime_problem(other),
    }
}

fn overloaded(text: &str) -> Problem {
    /// Long enough for a burst to pass, short enough not to waste a node that has room again.
    const RETRY_AFTER_MS: u64 = 1000;
    Problem::new(ErrorKind::Overloaded, format!("the node is full: {text}")).retry_after_ms(RETRY_AFTER_MS)
}

/// A place in the start queue.
struct Place<'a>(&'a Core);

impl<'a> Place<'a> {
    fn take(core: &'a Core) -> Result<Self, Problem> {
        let before = core.queued.fetch_add(1, Ordering::Relaxed);
        let place = Self(core);
        if before >= core.config.start_queue {
            return Err(overloaded(&format!("{before} creates are waiting")));
        }
        Ok(place)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.queued.fetch_sub(1, Ordering::Relaxed);
    }
}
