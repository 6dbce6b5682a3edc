//! The process that answers the kernel. It may die at any time: the holder starts the next one.

mod answer;
pub(crate) mod events;
mod guard;
mod handed;
pub(crate) mod pulse;
pub(crate) mod stats;

pub use guard::protect;
pub(crate) use handed::own_path;
pub use handed::{Handed, HandedError, run};

use crate::control::{Event, Who};
use crate::fetch::budget::{Budget, Limits};
use crate::fetch::source::Source as Inner;
use crate::fuse::Device;
use crate::layer::Layer;
use crate::layer::table::Layers;
use corral_store::{Store, StoreConfig};
use events::Events;
use pulse::Pulse;
use stats::Cgroups;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

/// How a server works.
#[derive(Debug, Clone)]
pub struct Config {
    /// The directory that holds `layers`.
    pub root: PathBuf,
    /// What may be under way.
    pub limits: Limits,
    /// Bytes that are brought before a reader that goes forward.
    pub ahead_bytes: u64,
    /// Stored bytes that come with a chunk somebody waits for, behind it in its pack; half as many before it.
    pub around_bytes: u64,
    /// How long a read waits for the store.
    pub wait_limit: Duration,
    /// How long first reads are recorded after an open.
    pub trace_time: Duration,
    /// How many are recorded at most.
    pub trace_chunks: usize,
    /// Threads that answer the kernel.
    pub threads: usize,
    /// The boot under which presence is believed; the host's where there is none here. For tests.
    pub boot_id: Option<String>,
}

impl Config {
    /// Usual values.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            limits: Limits::default(),
            ahead_bytes: 8 << 20,
            around_bytes: 128 << 10,
            wait_limit: Duration::from_secs(60),
            trace_time: Duration::from_secs(60),
            trace_chunks: 16_384,
            threads: 4,
            boot_id: None,
        }
    }

    fn boot_id(&self) -> io::Result<String> {
        match &self.boot_id {
            Some(id) => Ok(id.clone()),
            None => std::fs::read_to_string("/proc/sys/kernel/random/boot_id"),
        }
    }
}

/// Where chunks come from.
#[derive(Debug)]
pub struct Source(Inner);

impl Source {
    /// A store that is open.
    pub fn of(store: Arc<dyn Store>) -> Self {
        Self(Inner::of(store))
    }

    /// A store that is opened when it is needed, and again until that succeeds.
    pub fn named(config: StoreConfig) -> Self {
        Self(Inner::named(config))
    }
}

/// All that the threads and tasks of a server share.
#[derive(Debug)]
pub(crate) struct Core {
    pub config: Config,
    pub source: Inner,
    pub budget: Budget,
    pub layers: Layers,
    pub events: Events,
    pub cgroups: Cgroups,
    pub device: Device,
    pub runtime: tokio::runtime::Handle,
    /// Reads that wait, by the kernel's number.
    pub waiting: Mutex<HashMap<u64, AbortHandle>>,
    /// Memory for answers of reads that waited: as many at once as this gives leave for.
    pub answers: Semaphore,
    pub who: handed::Identity,
    pub pulse: Pulse,
}

/// Answers of reads that waited which are in memory at once, of up to [`crate::fuse::MAX_READ`] each.
const ANSWERS: usize = 16;

impl Core {
    /// When all chunks are here and nothing is under way, forces them to the disk. Called after each change.
    pub fn finish_if_full(self: &Arc<Self>, layer: &Arc<Layer>) {
        let is_due = layer.map.is_full() && !layer.map.is_complete() && layer.flights.count() == 0;
        if !is_due || layer.finishing.swap(true, Ordering::AcqRel) {
            return;
        }
        let (core, layer) = (Arc::clone(self), Arc::clone(layer));
        self.runtime.spawn_blocking(move || {
            let done = layer.finish();
            layer.finishing.store(false, Ordering::Release);
            match done {
                Ok(true) => core.events.push(Event::Complete { layer: layer.id }),
                Ok(false) => {}
                Err(error) => {
                    tracing::error!(layer = %layer.id, %error, "a complete layer cannot be forced to the disk")
                }
            }
        });
    }

    pub fn who(&self) -> Who {
        self.who.tell(&self.config.root, self.events.epoch)
    }
}

/// A running server; ends when the file system is unmounted.
#[derive(Debug)]
pub struct Server {
    core: Arc<Core>,
    threads: Vec<std::thread::JoinHandle<()>>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Server {
    /// Answers the requests of a FUSE connection, new or taken over.
    ///
    /// # Errors
    /// Threads cannot be started, or the boot of the host is not known.
    pub fn start(config: Config, source: Source, device: OwnedFd) -> io::Result<Self> {
        Self::start_as(config, source, device, handed::Identity::default())
    }

    fn start_as(config: Config, source: Source, device: OwnedFd, who: handed::Identity) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(4)
            // A store in a directory whose server hangs may hold 64; what is unpacked must find one nevertheless.
            .max_blocking_threads(192)
            .thread_stack_size(512 << 10)
            .thread_name("lazy-fetch")
            .enable_all()
            .build()?;
        let threads = config.threads.max(1);
        let core = Arc::new(Core {
            layers: Layers::new(&config.root, config.boot_id()?),
            budget: Budget::new(config.limits),
            source: source.0,
            events: Events::new(),
            cgroups: Cgroups::default(),
            device: Device::new(device),
            runtime: runtime.handle().clone(),
            waiting: Mutex::default(),
            answers: Semaphore::new(ANSWERS),
            who,
            pulse: Pulse::new(threads),
            config,
        });
        if let Some(cause) = core.who.replaces() {
            core.events.push(Event::Restarted { cause });
        }
        // What the server before was handed and did not answer. A new connection has none.
        if let Err(error) = core.device.resend() {
            tracing::error!(%error, "requests of a server that ended cannot be had again: this takes Linux 6.9");
        }
        let answer = |n| {
            let core = Arc::clone(&core);
            std::thread::Builder::new().name(format!("lazy-{n}")).spawn(move || answer::run(&core, n))
        };
        let threads = (0..threads).map(answer).collect::<io::Result<_>>()?;
        Ok(Self { core, threads, runtime: Some(runtime) })
    }

    /// Answers clients that connect to a socket.
    ///
    /// # Errors
    /// It cannot be used.
    pub fn listen(&self, listener: std::os::unix::net::UnixListener) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        let _inside = self.core.runtime.enter();
        let listener = tokio::net::UnixListener::from_std(listener)?;
        self.core.runtime.spawn(crate::control::serve::serve(Arc::clone(&self.core), listener));
        Ok(())
    }

    /// Waits until the file system is unmounted.
    pub fn wait(mut self) {
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            thread.join().unwrap_or(());
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }
}
