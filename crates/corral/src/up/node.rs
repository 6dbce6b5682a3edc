//! The node of `corral up`: what is needed of it here, and where it is started.

use corral_api::ids::NodeId;
use std::path::PathBuf;
use std::pin::Pin;
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
    // CONNECT THE NODE HERE: corral_node::Node::start(NodeConfig from `options`), bind `<data_dir>/node.sock` (mode
    // 0600), and put handle.serve(…) into `serving`.
    let NodeOptions { data_dir, max_live, memory_floor_mib, ephemeral } = options;
    anyhow::bail!("this build has no node ({data_dir:?} {max_live:?} {memory_floor_mib:?} {ephemeral})")
}
