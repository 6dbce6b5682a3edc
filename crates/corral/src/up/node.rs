//! The node of `corral up`: what is needed of it here, and where it is started.

use corral_api::ids::NodeId;
use corral_node::{Node, NodeConfig, WritableConfig};
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Settings for the node.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// Where everything is kept.
    pub data_dir: PathBuf,
    /// The most sandboxes at a time.
    pub max_live: Option<u64>,
    /// Memory that must stay available.
    pub memory_floor_mib: Option<u64>,
    /// Creates under way at a time.
    pub start_queue: usize,
    /// How long ended sandboxes stay readable.
    pub keep_ended: Duration,
    /// Most output of ended commands kept for a live sandbox.
    pub keep_output_mib: u32,
    /// The store of layers that nodes share.
    pub store: Option<corral_node::StoreUrl>,
    /// Layers are fetched whole.
    pub whole_layers: bool,
    /// Most data of layers that the shared store has as well.
    pub cache_mib: Option<u32>,
    /// The step by which the space for writable layers grows.
    pub disk_step_mib: u64,
    /// Space on the disk that writable layers leave.
    pub disk_reserve_mib: u32,
    /// Nothing outlives the process.
    pub ephemeral: bool,
}

/// A node that was started.
pub struct LocalNode {
    /// Its id.
    pub id: NodeId,
    /// Socket it answers on. It takes connections before the gateway is announced.
    pub socket: PathBuf,
    /// Answers requests until `stop`; ends with the reason when it cannot go on.
    pub serving: Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>>,
    /// Cancelled once the gateway has drained.
    pub stop: CancellationToken,
}

/// Starts the node.
///
/// # Errors
/// It cannot be started.
pub async fn start(options: &NodeOptions) -> anyhow::Result<LocalNode> {
    let mut config = NodeConfig::new(&options.data_dir);
    if let Some(max_live) = options.max_live {
        config.max_live = max_live;
    }
    if let Some(floor) = options.memory_floor_mib {
        config.memory_floor_mib = floor;
    }
    config.start_queue = options.start_queue;
    config.keep_ended = options.keep_ended;
    config.store.clone_from(&options.store);
    config.whole_layers = options.whole_layers;
    config.cache_bytes = options.cache_mib.map(|mib| u64::from(mib) << 20);
    config.keep_output_bytes = u64::from(options.keep_output_mib) << 20;
    config.writable = WritableConfig::of(options.disk_step_mib << 20, u64::from(options.disk_reserve_mib) << 20);
    let mut handle = Node::start(config).await?;
    let id = handle.id().clone();
    let socket = options.data_dir.join("node.sock");
    handle.serve(&socket).await?;
    let stop = CancellationToken::new();
    let (stopped, ephemeral) = (stop.clone(), options.ephemeral);
    let serving = Box::pin(async move {
        stopped.cancelled().await;
        handle.drain();
        if ephemeral {
            // What stays is in the log.
            let _left = handle.stop_everything().await;
        }
        handle.close().await;
        Ok(())
    });
    Ok(LocalNode { id, socket, serving, stop })
}
