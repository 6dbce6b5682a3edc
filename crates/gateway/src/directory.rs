//! The nodes this gateway knows and what they last said of themselves, with the creates on their way laid over it.

use crate::node_channel::{NodeAddress, NodeChannel};
use crate::placement::{Candidate, choose};
use crate::refusal::Refusal;
use corral_api::ids::NodeId;
use corral_api::node::NodeStatus;
use corral_api::problem::ErrorKind;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long a node may take to say how it is.
const STATUS_LIMIT: Duration = Duration::from_secs(2);
/// The most bytes of a status or an error document that are read.
pub const DOCUMENT_LIMIT: usize = 1 << 20;

/// One node.
#[derive(Debug)]
pub struct Node {
    /// The way to it.
    pub channel: NodeChannel,
    last: Mutex<Option<NodeStatus>>,
    placing: AtomicU64,
}

/// A create on its way to a node; counted until dropped.
#[derive(Debug)]
pub struct Placing(Arc<Node>);

impl Placing {
    /// The chosen node.
    pub fn node(&self) -> &Node {
        &self.0
    }
}

impl Drop for Placing {
    fn drop(&mut self) {
        self.0.placing.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Node {
    /// Asks the node how it is. `None` when it does not answer in time.
    pub async fn refresh(&self) -> Option<NodeStatus> {
        let ask = async {
            let response = self.channel.get("/rpc/status").await.ok().filter(|r| r.status() == 200)?;
            let body = axum::body::to_bytes(response.into_body(), DOCUMENT_LIMIT).await.ok()?;
            serde_json::from_slice::<NodeStatus>(&body).ok()
        };
        let status = tokio::time::timeout(STATUS_LIMIT, ask).await.ok().flatten();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match &status {
            Some(status) => *last = Some(status.clone()),
            None => {
                if let Some(last) = last.as_mut() {
                    last.accepting = false;
                }
            }
        }
        status
    }

    /// What the node last said; it takes no sandboxes while it does not answer.
    pub fn last_status(&self) -> Option<NodeStatus> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn candidate(&self) -> Candidate {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let placing = self.placing.load(Ordering::Relaxed);
        last.as_ref().map_or(Candidate { accepting: true, load: placing, capacity: u64::MAX }, |status| Candidate {
            accepting: status.accepting,
            load: status.live + placing,
            capacity: status.max_live,
        })
    }
}

/// All known nodes, by id.
#[derive(Debug)]
pub struct Directory {
    nodes: BTreeMap<NodeId, Arc<Node>>,
}

impl Directory {
    /// A directory of these nodes.
    pub fn new(nodes: impl IntoIterator<Item = (NodeId, NodeAddress)>) -> Self {
        let node = |(id, address): (NodeId, NodeAddress)| {
            let channel = NodeChannel::new(id.clone(), address);
            (id, Arc::new(Node { channel, last: Mutex::new(None), placing: AtomicU64::new(0) }))
        };
        Self { nodes: nodes.into_iter().map(node).collect() }
    }

    /// All nodes.
    pub fn nodes(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.nodes.values()
    }

    /// The node that made a sandbox id.
    pub fn by_hint(&self, hint: &str) -> Option<&Arc<Node>> {
        self.nodes.get(&hint.parse::<NodeId>().ok()?)
    }

    /// The node that answers for all of them. There is one so far.
    ///
    /// # Errors
    /// No node is known.
    pub fn any(&self) -> Result<&Arc<Node>, Refusal> {
        self.nodes.values().next().ok_or_else(no_node)
    }

    /// Chooses the node of a new sandbox.
    ///
    /// # Errors
    /// No node is known.
    pub fn place(&self) -> Result<Placing, Refusal> {
        let node = if self.nodes.len() == 1 {
            self.any()?
        } else {
            let nodes: Vec<_> = self.nodes.values().collect();
            let candidates: Vec<_> = nodes.iter().map(|node| node.candidate()).collect();
            let index = choose(&candidates, &mut |below| random_below(below)).ok_or_else(no_node)?;
            nodes[index]
        };
        node.placing.fetch_add(1, Ordering::Relaxed);
        Ok(Placing(Arc::clone(node)))
    }
}

fn no_node() -> Refusal {
    Refusal::new(ErrorKind::Unavailable, "no node is known").retry_after_ms(1000)
}

fn random_below(below: usize) -> usize {
    // Only spreads load: the slight bias of the remainder does not matter.
    getrandom::u64().map_or(0, |n| (n % below.max(1) as u64) as usize)
}
