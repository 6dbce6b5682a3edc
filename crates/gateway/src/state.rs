//! What all handlers share.

use crate::catalogue::Catalogue;
use crate::directory::{Directory, Node};
use crate::metrics::Metrics;
use crate::refusal::{Answer, Refusal};
use crate::unsettled::Unsettled;
use crate::{CatalogueError, tunnel};
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, Uri};
use corral_api::catalogue::PROJECT_HEADER;
use corral_api::ids::SandboxId;
use corral_api::problem::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Settings of a gateway.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// Largest JSON body.
    pub json_limit_bytes: usize,
    /// Largest head of a request: path, query and headers.
    pub head_limit_bytes: usize,
    /// How long requests in flight may go on once the gateway shuts down.
    pub drain_limit: Duration,
    /// How long `/readyz` says 503 before new connections are refused, for load balancers that poll it.
    pub drain_notice: Duration,
    /// Creates of one batch that run at the same time.
    pub batch_concurrency: usize,
    /// Builds that go on at the same time.
    pub most_builds: usize,
    /// The largest build context, also once it is decompressed.
    pub build_limit_bytes: u64,
    /// Where contexts lie while they are built, in files without a name.
    pub spool_dir: PathBuf,
    /// Allows plain HTTP on an address that is not loopback.
    pub insecure_listen: bool,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            json_limit_bytes: 2 << 20,
            head_limit_bytes: 32 << 10,
            drain_limit: Duration::from_secs(30),
            drain_notice: Duration::ZERO,
            batch_concurrency: 64,
            most_builds: 16,
            build_limit_bytes: 8 << 30,
            spool_dir: std::env::temp_dir(),
            insecure_listen: false,
        }
    }
}

/// Whose request it is; set by the edge on everything under `/v1`.
#[derive(Debug, Clone)]
pub struct Caller {
    /// The project.
    pub project_id: Arc<str>,
}

/// What all handlers share.
#[derive(Debug)]
pub struct Shared {
    /// Settings.
    pub config: GatewayConfig,
    /// Names and keys.
    pub catalogue: Arc<Catalogue>,
    /// Nodes.
    pub directory: Directory,
    /// The API's description, made when it is first asked for.
    pub description: fn() -> &'static str,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Imports, builds and snapshots under way.
    pub unsettled: Arc<Unsettled>,
    /// Places for builds.
    pub builds: Arc<Semaphore>,
    /// Whether the gateway shuts down.
    pub draining: AtomicBool,
    /// Cancelled when the gateway shuts down: streams without an end stop.
    pub stop: CancellationToken,
}

/// The state of the router.
pub type Gw = Arc<Shared>;

impl Shared {
    /// Runs a catalogue call on the blocking pool.
    ///
    /// # Errors
    /// What the call refuses with.
    pub async fn catalogue<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Catalogue) -> Result<T, CatalogueError> + Send + 'static,
    ) -> Result<T, Refusal> {
        let catalogue = Arc::clone(&self.catalogue);
        match tokio::task::spawn_blocking(move || call(&catalogue)).await {
            Ok(result) => Ok(result?),
            Err(error) => Err(Refusal::internal("a look-up in the catalogue", &error)),
        }
    }

    /// Sends a request to the node of the sandbox in its path.
    ///
    /// # Errors
    /// No node made the id, or the node does not answer.
    pub async fn forward(&self, request: Request) -> Answer {
        self.forward_repeatable(request, false).await
    }

    /// As [`Self::forward`]; `repeatable` says that doing it twice is the same as once.
    ///
    /// # Errors
    /// No node made the id, or the node does not answer.
    pub async fn forward_repeatable(&self, mut request: Request, repeatable: bool) -> Answer {
        let node = self.node_of(&request)?;
        claim(&mut request);
        Ok(node.channel.send(request, repeatable).await?)
    }

    /// Forwards a WebSocket upgrade to the node of the sandbox in its path.
    ///
    /// # Errors
    /// It is no upgrade, no node made the id, or the node does not answer.
    pub async fn forward_upgrade(&self, mut request: Request) -> Answer {
        let node = self.node_of(&request)?;
        claim(&mut request);
        tunnel::forward(&node.channel, request, self.stop.child_token()).await
    }

    /// Sends a request to a node under another path, with the query as it is.
    ///
    /// # Errors
    /// The node does not answer.
    pub async fn forward_as(&self, node: &Node, mut request: Request, path: &str) -> Answer {
        claim(&mut request);
        let target = match request.uri().query() {
            Some(query) => format!("{path}?{query}"),
            None => path.to_owned(),
        };
        *request.uri_mut() =
            target.parse::<Uri>().map_err(|_| Refusal::invalid("the path or query cannot be forwarded"))?;
        Ok(node.channel.send(request, false).await?)
    }

    fn node_of(&self, request: &Request) -> Result<&Node, Refusal> {
        let rest = request.uri().path().strip_prefix("/v1/sandboxes/").unwrap_or_default();
        let text = rest.split('/').next().unwrap_or_default();
        let unknown = || {
            let shown: String = text.chars().take(80).collect();
            let mut refusal = Refusal::new(ErrorKind::NotFound, format!("there is no sandbox {shown:?}"));
            refusal.problem.sandbox_id = Some(shown);
            refusal
        };
        let id: SandboxId = text.parse().map_err(|_| unknown())?;
        Ok(self.directory.by_hint(id.node_hint()).ok_or_else(unknown)?)
    }
}

/// Tells the node whose request it is. What the client may have put there is overwritten.
pub fn claim(request: &mut Request) {
    let project =
        request.extensions().get::<Caller>().and_then(|caller| HeaderValue::from_str(&caller.project_id).ok());
    let name = HeaderName::from_static(PROJECT_HEADER);
    match project {
        Some(project) => request.headers_mut().insert(name, project),
        None => request.headers_mut().remove(name),
    };
}
