//! A node for tests: answers the routes on a UNIX socket with fixed or echoing answers, and counts what it sees.
//! Nothing of it is part of a build.
#![allow(dead_code, clippy::unwrap_used, reason = "shared by several tests, each of which uses a part")]

mod handlers;

use axum::http::HeaderMap;
use corral_api::command::ExecSpec;
use corral_api::digest::Digest;
use corral_api::ids::{NodeId, SandboxId};
use corral_api::image::{ImageConfig, ImageRecord, LayerKind, LayerRecord};
use corral_api::sandbox::CreateOnNode;
use corral_gateway::{Catalogue, Gateway, GatewayConfig, NodeAddress};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};
use tokio::sync::{Notify, Semaphore};

pub const MIB: u64 = 1 << 20;

/// What the node saw and what holds it back.
pub struct Seen {
    pub id: NodeId,
    pub creates: Mutex<Vec<CreateOnNode>>,
    pub creating: AtomicUsize,
    pub most_creating: AtomicUsize,
    pub execs: Mutex<Vec<ExecSpec>>,
    pub removed: Mutex<Vec<String>>,
    pub last_headers: Mutex<HeaderMap>,
    pub last_uri: Mutex<String>,
    pub read_bytes: AtomicU64,
    pub sent_bytes: AtomicU64,
    /// Permits for requests marked slow and for uploads.
    pub gate: Semaphore,
    /// A slow request has begun.
    pub begun: Notify,
    /// A slow request was dropped before its answer.
    pub dropped: Notify,
    pub files: Mutex<HashMap<String, Vec<u8>>>,
}

type Node = Arc<Seen>;

pub struct FakeNode {
    pub seen: Node,
    pub socket: PathBuf,
    dir: tempfile::TempDir,
    task: tokio::task::JoinHandle<()>,
}

impl FakeNode {
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("node.sock");
        let seen = Arc::new(Seen {
            id: NodeId::random(),
            creates: Mutex::default(),
            creating: AtomicUsize::new(0),
            most_creating: AtomicUsize::new(0),
            execs: Mutex::default(),
            removed: Mutex::default(),
            last_headers: Mutex::default(),
            last_uri: Mutex::default(),
            read_bytes: AtomicU64::new(0),
            sent_bytes: AtomicU64::new(0),
            gate: Semaphore::new(0),
            begun: Notify::new(),
            dropped: Notify::new(),
            files: Mutex::default(),
        });
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let router = handlers::router().with_state(Arc::clone(&seen));
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { seen, socket, dir, task }
    }

    /// Ends it and its socket.
    pub async fn stop(self) {
        self.task.abort();
        assert!(self.task.await.is_err());
        std::fs::remove_file(&self.socket).unwrap();
    }
}

/// A gateway over a fake node, listening on loopback.
pub struct Front {
    pub node: FakeNode,
    pub catalogue: Arc<Catalogue>,
    pub key: String,
    pub address: SocketAddr,
    pub shutdown: Arc<Notify>,
    pub serving: tokio::task::JoinHandle<Result<(), corral_gateway::ServeError>>,
}

impl Front {
    pub async fn start() -> Self {
        Self::with(GatewayConfig::default()).await
    }

    pub async fn with(config: GatewayConfig) -> Self {
        let node = FakeNode::start();
        let catalogue = Arc::new(Catalogue::in_memory().unwrap());
        catalogue.put_image("default", &image("base", b"layer")).unwrap();
        let key = catalogue.create_key("default", "test").unwrap().key;
        let address = NodeAddress::Unix(node.socket.clone());
        let gateway = Gateway::new(config, Arc::clone(&catalogue), [(node.seen.id.clone(), address)]);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = Arc::new(Notify::new());
        let told = Arc::clone(&shutdown);
        let serving = tokio::spawn(gateway.serve(listener, None, async move { told.notified().await }));
        Self { node, catalogue, key, address, shutdown, serving }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Path of a sandbox of the node.
    pub fn sandbox(&self, rest: &str) -> String {
        self.url(&format!("/v1/sandboxes/{}{rest}", SandboxId::new(&self.node.seen.id)))
    }
}

pub fn image(name: &str, layer: &[u8]) -> ImageRecord {
    ImageRecord {
        name: name.into(),
        digest: Digest::of(name.as_bytes()),
        source_digest: None,
        platform: "linux/amd64".into(),
        config: ImageConfig { workdir: "/".into(), ..ImageConfig::default() },
        layers: vec![layer_record(layer, LayerKind::Base)],
        size_bytes: layer.len() as u64,
        snapshot: None,
    }
}

pub fn layer_record(content: &[u8], kind: LayerKind) -> LayerRecord {
    LayerRecord { digest: Digest::of(content), kind, at: "/".into(), size_bytes: content.len() as u64, entries: 1 }
}
