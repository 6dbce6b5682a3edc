//! Starting and ending a node.

use crate::config::NodeConfig;
use crate::keepers::Keepers;
use crate::lazy::Lazy;
use crate::ledger::{Ledger, LedgerError};
use crate::node::{Core, Parts};
use corral_api::ids::NodeId;
use corral_api::sandbox::{EndReason, EndStatus};
use corral_layers::{Joined, LayerStore, LayersConfig, SharedError, SharedLayers, StoreConfig};
use corral_runtime::RuntimeError;
use corral_runtime::container::Containers;
use corral_runtime::keeper_process::Programs;
use corral_store::Store;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::mpsc;

/// Host memory that one idle sandbox may come to take before it is told to be too many: well above what it takes.
const BYTES_PER_SANDBOX: u64 = 2 << 20;

/// Why a node did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A directory cannot be made.
    #[error("cannot make {path}")]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// The ledger.
    #[error("the node's ledger cannot be used")]
    Ledger(#[source] LedgerError),
    /// Containers cannot be run here.
    #[error("containers cannot be run on this host")]
    Runtime(#[source] RuntimeError),
    /// The layer store.
    #[error("the layer store cannot be used")]
    Layers(#[source] corral_layers::StoreError),
    /// The shared store.
    #[error("the shared store of layers cannot be used")]
    Shared(#[source] SharedError),
    /// The server of lazy reads.
    #[error("the server of lazy reads cannot be started")]
    Lazy(#[source] corral_lazy::client::ProcessError),
    /// The socket.
    #[error("cannot listen on {path}")]
    Listen {
        /// Where.
        path: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
}

/// Starts nodes.
#[derive(Debug)]
pub struct Node;

/// A node that runs. Dropping it leaves the sandboxes to the keepers.
#[derive(Debug)]
pub struct NodeHandle {
    core: Arc<Core>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    taken_over: usize,
}

fn make_private(path: &Path) -> Result<(), StartError> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|source| StartError::Directory { path: path.to_owned(), source })
}

impl Node {
    /// Starts a node in a data directory and takes over what lives there.
    ///
    /// # Errors
    /// What is missing or in the way.
    pub async fn start(mut config: NodeConfig) -> Result<NodeHandle, StartError> {
        let data = config.data_dir.clone();
        for dir in [data.clone(), data.join("run"), data.join("logs"), data.join("layers"), data.join("spool")] {
            make_private(&dir)?;
        }
        // First what takes nothing of the host.
        let remote = open_store(config.store.as_ref().map(|store| &store.config))
            .await
            .map_err(|e| StartError::Shared(SharedError::Remote(e)))?;
        let programs = Programs::find().map_err(StartError::Runtime)?;
        if config.max_live == 0 {
            config.max_live = (crate::upkeep::memory().total_bytes / BYTES_PER_SANDBOX).max(16);
        }
        let ledger = match Ledger::open(&data.join("ledger.db")) {
            Err(error) if config.ending => {
                tracing::warn!(error = %crate::error::chain(&error), "the ledger cannot be used: what lives is ended unnamed");
                Ledger::in_memory()
            }
            opened => opened,
        };
        let ledger = ledger.map_err(StartError::Ledger)?;
        let id = node_id(&data, &ledger)?;
        let rebooted = note_boot(&ledger)?;
        let (_, last_event) = ledger.event_range().map_err(StartError::Ledger)?;
        let live = ledger.live().map_err(StartError::Ledger)?;
        let (writable, dir, name) = (config.writable.clone(), data.clone(), format!("corral-{id}"));
        let containers = tokio::task::spawn_blocking(move || Containers::open(&dir, &name, writable))
            .await
            .map_err(|_| StartError::Runtime(RuntimeError::Gone))?
            .map_err(StartError::Runtime)?;
        let is_lost = corral_lazy::holder::is_lost(&data.join("layers"));
        let lazy = start_lazy(&config, &programs).await?;
        let lazy_running = lazy.clone().or_else(|| Lazy::find(&data.join("layers"), &data.join("run")).map(Arc::new));
        let layers_config = LayersConfig {
            plain_http_hosts: config.plain_http_hosts.clone(),
            lazy_reads: lazy.is_some(),
            ..LayersConfig::default()
        };
        let layers = LayerStore::open(data.join("layers"), layers_config).map_err(StartError::Layers)?;
        let shared = match remote {
            Some(remote) => Some(join_store(&layers, remote, &id).await.map_err(StartError::Shared)?),
            None => None,
        };
        let (send, notices) = mpsc::unbounded_channel();
        let keepers = Keepers::new(programs, &data.join("run"), config.max_live, config.ending, send);
        let core = Arc::new(Core::new(Parts {
            id,
            config,
            ledger,
            containers: Arc::new(containers),
            keepers,
            layers,
            shared,
            lazy: lazy.clone(),
            lazy_running,
            last_event,
        }));
        let (adopted, hearing) = core.adopt(live, rebooted, notices).await.map_err(StartError::Runtime)?;
        if is_lost {
            core.lose_lazy().await;
        }
        let taken_over = adopted.total();
        tracing::info!(?adopted, "the node is ready");
        let looking = core.clone();
        let looking = tokio::spawn(async move { looking.keepers.look_after().await });
        let mut tasks = vec![hearing, looking, tokio::spawn(core.clone().keep_up())];
        if let Some(lazy) = lazy {
            if let Some(shared) = core.shared.clone() {
                tasks.push(tokio::spawn(core.clone().keep_cache(lazy.clone(), shared)));
            }
            tasks.push(tokio::spawn(core.clone().guard_lazy(lazy.clone())));
            tasks.push(tokio::spawn(core.clone().hear_lazy(lazy)));
        }
        Ok(NodeHandle { core, tasks, taken_over })
    }
}

/// Opens the store that nodes share, and makes sure that it can be used.
async fn open_store(store: Option<&StoreConfig>) -> Result<Option<Arc<dyn Store>>, corral_store::StoreError> {
    let Some(store) = store else { return Ok(None) };
    let remote = store.open()?;
    remote.check().await?;
    tracing::info!(store = remote.describe(), "layers are shared");
    Ok(Some(remote))
}

/// Starts the server of lazy reads, or takes over the one that runs, where there is something to read lazily.
async fn start_lazy(config: &NodeConfig, programs: &Programs) -> Result<Option<Arc<Lazy>>, StartError> {
    let run = config.data_dir.join("run");
    let layers = config.data_dir.join("layers");
    let store = match &config.store {
        Some(store) if !config.whole_layers => store.clone(),
        _ => return Ok(None),
    };
    if !programs.lazy.is_file() {
        tracing::warn!(program = %programs.lazy.display(), "there is no server of lazy reads: layers are fetched whole");
        return Ok(None);
    }
    make_private(&layers.join("layers"))?;
    Lazy::ensure(&programs.lazy, &layers, &run, &store).await.map(|lazy| Some(Arc::new(lazy))).map_err(StartError::Lazy)
}

/// Joins the layers here to those of the shared store.
async fn join_store(layers: &LayerStore, remote: Arc<dyn Store>, id: &NodeId) -> Result<SharedLayers, SharedError> {
    let shared = SharedLayers::open(layers.clone(), remote)?;
    // So far each node has a catalogue of its own.
    let joined = shared.join(id.as_str()).await?;
    if joined == Joined::Astray {
        tracing::warn!(
            store = shared.store().describe(),
            joined = %shared.joined_path().display(),
            "the shared store has no mark of this node, which used it before: nothing is published until it has, since its \
             mount may be missing; where it was replaced, remove the file `joined` and start the node again"
        );
    }
    // What others published before is not stored again. It can be learned while the node works.
    let learner = shared.clone();
    tokio::spawn(async move {
        match learner.learn_all().await {
            Ok(new) => tracing::info!(new, "layers of the shared store are known"),
            Err(error) => tracing::warn!(error = %crate::error::chain(&error), "the shared store cannot be listed"),
        }
        if joined == Joined::First {
            match learner.publish_lacking().await {
                Ok(0) => {}
                Ok(published) => tracing::info!(published, "layers that were made before are in the shared store"),
                Err(error) => tracing::warn!(error = %crate::error::chain(&error), "the shared store cannot be listed"),
            }
        }
    });
    Ok(shared)
}

fn known_text(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The node's id, made once for a data directory and kept outside the ledger, which may be put aside.
fn node_id(data: &Path, ledger: &Ledger) -> Result<NodeId, StartError> {
    let path = data.join("node-id");
    let directory = |source| StartError::Directory { path: path.clone(), source };
    let known = known_text(&path).and_then(|t| t.parse().ok());
    let id: NodeId = match known {
        Some(id) => id,
        None => match ledger.meta("node_id").map_err(StartError::Ledger)?.and_then(|t| t.parse().ok()) {
            Some(id) => id,
            None => NodeId::random(),
        },
    };
    // Not again: there may be no room.
    if known_text(&path).as_deref() != Some(id.as_str()) {
        let part = path.with_extension("part");
        std::fs::write(&part, format!("{id}\n")).and_then(|()| std::fs::rename(&part, &path)).map_err(directory)?;
    }
    ledger.set_meta("node_id", id.as_str()).map_err(StartError::Ledger)?;
    Ok(id)
}

/// Whether the host was started anew since the last start, and notes this one.
fn note_boot(ledger: &Ledger) -> Result<bool, StartError> {
    let now = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let before = ledger.meta("boot_id").map_err(StartError::Ledger)?;
    ledger.set_meta("boot_id", now.trim()).map_err(StartError::Ledger)?;
    Ok(before.is_some_and(|b| b != now.trim()))
}

impl NodeHandle {
    /// The node's id.
    pub fn id(&self) -> &NodeId {
        &self.core.id
    }

    /// Serves the node's routes on a UNIX socket, for the gateway. Returns once it listens.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub async fn serve(&mut self, socket: &Path) -> Result<(), StartError> {
        use std::os::unix::fs::PermissionsExt;
        let failed = |source| StartError::Listen { path: socket.to_owned(), source };
        if socket.exists() {
            std::fs::remove_file(socket).map_err(failed)?;
        }
        let listener = tokio::net::UnixListener::bind(socket).map_err(failed)?;
        std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
        let router = crate::http::router(self.core.clone());
        self.tasks.push(tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                tracing::error!(%error, "the node's socket failed");
            }
        }));
        Ok(())
    }

    /// Refuses new sandboxes from now on.
    pub fn drain(&self) {
        self.core.draining.store(true, Ordering::Relaxed);
    }

    /// How many sandboxes there were when it was started, be it that they were adopted, ended or removed.
    pub fn taken_over(&self) -> usize {
        self.taken_over
    }

    /// Ends every sandbox and every keeper, and gives back what the host gave: nothing stays but the data directory.
    /// Returns what could not be ended or given back.
    pub async fn stop_everything(&self) -> Vec<String> {
        self.drain();
        if let Some(lazy) = &self.core.lazy_running
            && let Err(error) = lazy.retire().await
        {
            tracing::error!(error = %crate::error::chain(&error), "what waits for reads of layers may not end");
        }
        let mut endings = tokio::task::JoinSet::new();
        for sandbox in self.core.all() {
            let core = self.core.clone();
            endings.spawn(async move {
                let mut end = EndStatus::new(EndReason::Stopped, "the node was shut down with its sandboxes");
                end.cause = corral_api::sandbox::Cause::Operator;
                core.end(&sandbox, end).await
            });
        }
        while endings.join_next().await.is_some() {}
        let mut left = self.core.keepers.shut_down().await;
        left.extend(self.core.layers.unmount_all().err().iter().flatten().map(|e| crate::error::chain(e)));
        match &self.core.lazy_running {
            Some(lazy) => left.extend(lazy.end().await.err().map(|e| crate::error::chain(&e))),
            // What one left that was killed.
            None => corral_lazy::holder::unmount(&self.core.config.data_dir.join("layers")),
        }
        left.extend(self.core.containers.detach().err().iter().flatten().map(|e| crate::error::chain(e)));
        for what in &left {
            tracing::warn!(what, "something of the node stays on the host");
        }
        left
    }

    /// Writes what is to be written. Sandboxes go on under their keepers.
    pub async fn close(self) {
        for task in &self.tasks {
            task.abort();
        }
        // A failure is logged by the writer.
        self.core.ledger.settle().await.unwrap_or(());
    }
}
