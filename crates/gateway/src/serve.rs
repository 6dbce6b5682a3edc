//! The gateway as a server: routes, TLS, and shutting down without losing requests.

use crate::catalogue::Catalogue;
use crate::directory::Directory;
use crate::edge::edge;
use crate::linger::linger;
use crate::metrics::Metrics;
use crate::node_channel::NodeAddress;
use crate::only_tls::OnlyTls;
use crate::refusal::Refusal;
use crate::state::{GatewayConfig, Gw, Shared};
use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum_server::accept::{TcpConfigAcceptor, TcpKeepaliveConfig, TcpSocketConfig};
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use axum_server::{Handle, Server};
use corral_api::ids::NodeId;
use corral_api::problem::ErrorKind;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// How long a new connection may take to send its first request.
const FIRST_REQUEST_LIMIT: Duration = Duration::from_secs(30);
/// When a silent connection is first asked whether its client is still there, and how often then.
const KEEPALIVE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// How often placement learns of the load of several nodes.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// What hyper buffers of a request's head before it gives up; the gateway's own limit answers earlier.
const HEAD_BUFFER: usize = 256 << 10;

/// Certificate chain and key in PEM.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// Certificate chain, the server's own first.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Why the gateway does not serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Keys would cross a network in the clear.
    #[error("refusing to serve plain HTTP on {0}: give a TLS certificate, listen on loopback, or allow it explicitly")]
    InsecureListen(SocketAddr),
    /// The certificate or key cannot be used.
    #[error("cannot use the certificate {} with the key {}", files.cert.display(), files.key.display())]
    Tls {
        /// The files.
        files: TlsFiles,
        /// Why.
        source: io::Error,
    },
    /// The listener failed.
    #[error("cannot serve on the listener")]
    Listener(#[source] io::Error),
}

/// The gateway, ready to serve.
#[derive(Debug)]
pub struct Gateway {
    shared: Gw,
}

impl Gateway {
    /// A gateway to these nodes.
    pub fn new(
        config: GatewayConfig,
        catalogue: Arc<Catalogue>,
        nodes: impl IntoIterator<Item = (NodeId, NodeAddress)>,
    ) -> Self {
        let shared = Shared {
            builds: Arc::new(Semaphore::new(config.most_builds)),
            config,
            catalogue,
            directory: Directory::new(nodes),
            description: crate::openapi::document,
            metrics: Arc::new(Metrics::new()),
            unsettled: Arc::default(),
            draining: AtomicBool::new(false),
            stop: CancellationToken::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The public routes.
    pub fn router(&self) -> Router {
        let (routes, _) = crate::api::routes().split_for_parts();
        with_edge(routes, Arc::clone(&self.shared))
    }

    /// Serves until `shutdown`, then lets requests in flight finish up to the drain limit. Event streams and terminals,
    /// which clients resume, are ended at once.
    ///
    /// # Errors
    /// The address is not loopback and neither TLS nor `insecure_listen` is set, the certificate cannot be used, or the
    /// listener fails.
    pub async fn serve(
        self,
        listener: TcpListener,
        tls: Option<TlsFiles>,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), ServeError> {
        let address = listener.local_addr().map_err(ServeError::Listener)?;
        check_listen(address, tls.is_some(), self.shared.config.insecure_listen)?;
        // Before the first request: a build that begins has sandboxes, too.
        crate::build::sweep(Arc::clone(&self.shared)).await;
        let service = self.router().into_make_service();
        let handle = Handle::new();
        let mut server = axum_server::from_tcp(listener)
            .map_err(ServeError::Listener)?
            .handle(handle.clone())
            .first_request_timeout(FIRST_REQUEST_LIMIT);
        server.http_builder().http1().max_buf_size(HEAD_BUFFER);

        let ended = CancellationToken::new();
        let _guard = ended.clone().drop_guard();
        tokio::spawn(drain(Arc::clone(&self.shared), handle, shutdown, ended.clone()));
        if self.shared.directory.nodes().nth(1).is_some() {
            tokio::spawn(watch_nodes(Arc::clone(&self.shared), ended));
        }
        let served = match tls {
            None => server.acceptor(tcp()).serve(service).await,
            Some(files) => {
                let config = RustlsConfig::from_pem_file(&files.cert, &files.key)
                    .await
                    .map_err(|source| ServeError::Tls { files, source })?;
                with_tls(server, config).serve(service).await
            }
        };
        served.map_err(ServeError::Listener)
    }
}

type TlsServer = Server<SocketAddr, RustlsAcceptor<OnlyTls<TcpConfigAcceptor>>>;

fn with_tls<A>(server: Server<SocketAddr, A>, config: RustlsConfig) -> TlsServer {
    server.acceptor(RustlsAcceptor::new(config).acceptor(OnlyTls(tcp())))
}

/// Small answers leave at once, and clients that vanished are found out.
fn tcp() -> TcpConfigAcceptor {
    let keepalive = TcpKeepaliveConfig::new().time(KEEPALIVE).interval(KEEPALIVE_INTERVAL);
    TcpConfigAcceptor::new(TcpSocketConfig::new().nodelay(true).keepalive(keepalive))
}

fn check_listen(address: SocketAddr, tls: bool, insecure: bool) -> Result<(), ServeError> {
    if tls || insecure || address.ip().to_canonical().is_loopback() {
        return Ok(());
    }
    Err(ServeError::InsecureListen(address))
}

fn with_edge(routes: Router<Gw>, shared: Gw) -> Router {
    routes
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::disable())
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&shared), edge))
        .layer(axum::middleware::from_fn(linger))
        .with_state(shared)
}

async fn no_route(request: Request) -> Refusal {
    let path: String = request.uri().path().chars().take(200).collect();
    Refusal::new(ErrorKind::NotFound, format!("there is no route {path}"))
}

async fn wrong_method(request: Request) -> Refusal {
    let method = request.method();
    Refusal::new(ErrorKind::MethodNotAllowed, format!("this route does not take {method}"))
}

async fn drain(
    shared: Gw,
    handle: Handle<SocketAddr>,
    shutdown: impl Future<Output = ()> + Send,
    ended: CancellationToken,
) {
    tokio::select! {
        () = shutdown => {}
        () = ended.cancelled() => return,
    }
    shared.draining.store(true, Ordering::Relaxed);
    tokio::time::sleep(shared.config.drain_notice).await;
    tracing::info!(connections = handle.connection_count(), "draining");
    shared.stop.cancel();
    handle.graceful_shutdown(Some(shared.config.drain_limit));
}

async fn watch_nodes(shared: Gw, ended: CancellationToken) {
    let mut ticks = tokio::time::interval(STATUS_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = ended.cancelled() => return,
        }
        futures_util::future::join_all(shared.directory.nodes().map(|node| node.refresh())).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tower::ServiceExt as _;

    #[test]
    fn plain_http_is_for_loopback() {
        for (address, tls, insecure, fine) in [
            ("127.0.0.1:1", false, false, true),
            ("[::1]:1", false, false, true),
            ("[::ffff:127.0.0.1]:1", false, false, true),
            ("0.0.0.0:1", false, false, false),
            ("10.0.0.1:1", false, false, false),
            ("10.0.0.1:1", true, false, true),
            ("10.0.0.1:1", false, true, true),
        ] {
            assert_eq!(check_listen(address.parse().unwrap(), tls, insecure).is_ok(), fine, "{address}");
        }
    }

    #[tokio::test]
    async fn a_panic_becomes_a_problem_without_its_message() {
        async fn panics() -> &'static str {
            panic!("secret detail")
        }
        let gateway = Gateway::new(GatewayConfig::default(), Arc::new(Catalogue::in_memory().unwrap()), []);
        let router = with_edge(Router::new().route("/panics", axum::routing::get(panics)), gateway.shared);
        let request = Request::get("/panics").header("x-request-id", "r-1").body(axum::body::Body::empty()).unwrap();
        let response = router.oneshot(request).await.unwrap();
        assert_eq!(response.status(), 500);
        assert_eq!(response.headers()["x-request-id"], "r-1");
        let body = axum::body::to_bytes(response.into_body(), 9999).await.unwrap();
        let text = String::from_utf8(body.to_vec()).unwrap();
        assert!(text.contains("\"kind\":\"internal\"") && text.contains("\"request_id\":\"r-1\""), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
}
