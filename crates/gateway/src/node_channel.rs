//! A client to one node: pooled keep-alive HTTP/1.1 connections over its UNIX socket.
//!
//! Bodies pass through in both directions chunk by chunk; a slow reader slows the writer, and dropping an answer (or the
//! request that waits for it) closes its connection, by which the node learns that nobody waits any more.

use axum::body::Body;
use axum::http::header::{self, HeaderMap, HeaderName};
use axum::http::uri::PathAndQuery;
use axum::http::{Method, Request, Response, Uri, Version};
use corral_api::ids::NodeId;
use corral_api::problem::ErrorKind;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::Instant;

/// How long connecting may take, waits for a full listen queue included.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
const IDLE_CONNECTIONS: usize = 1024;
const IDLE_TIME: Duration = Duration::from_secs(60);

/// Header of a caller's key, beside `Authorization: Bearer`: never passed on to a node.
pub const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Where a node listens.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeAddress {
    /// A UNIX socket on this host.
    Unix(PathBuf),
}

/// Why a node did not answer.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// No connection: the request never reached it.
    #[error("node {node} does not answer")]
    Unreachable {
        /// Which node.
        node: NodeId,
        /// Why.
        source: hyper_util::client::legacy::Error,
    },
    /// The connection broke before the answer. The request may be sent again.
    #[error("node {node} broke off before it answered")]
    Lost {
        /// Which node.
        node: NodeId,
        /// Why.
        source: hyper_util::client::legacy::Error,
    },
    /// The connection broke before the answer, and sending the request again might do its work twice.
    #[error("node {node} broke off before it answered: what became of the request is not known")]
    Unknown {
        /// Which node.
        node: NodeId,
        /// Why.
        source: hyper_util::client::legacy::Error,
    },
}

impl NodeError {
    /// The kind callers see.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Unreachable { .. } => ErrorKind::Unavailable,
            Self::Lost { .. } => ErrorKind::UpstreamFailed,
            Self::Unknown { .. } => ErrorKind::OutcomeUnknown,
        }
    }

    /// Whether the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        self.kind().is_retryable()
    }
}

/// A client to one node. Clones share the connections.
#[derive(Debug, Clone)]
pub struct NodeChannel {
    id: NodeId,
    client: Client<Connector, Body>,
}

impl NodeChannel {
    /// A channel that connects when first used.
    pub fn new(id: NodeId, address: NodeAddress) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            .pool_idle_timeout(IDLE_TIME)
            .pool_timer(TokioTimer::new())
            .build(Connector { address });
        Self { id, client }
    }

    /// The node's id.
    pub fn id(&self) -> &NodeId {
        &self.id
    }

    /// Sends a request and returns the answer as soon as its head is there. The request's path and query are kept, its
    /// host is not. `repeatable` says that doing it twice is the same as once.
    ///
    /// # Errors
    /// The node does not answer. A node that answers with an error status is not an error here.
    pub async fn send(&self, mut request: Request<Body>, repeatable: bool) -> Result<Response<Body>, NodeError> {
        strip_hop_headers(request.headers_mut());
        self.send_as_is(request, repeatable).await
    }

    /// As [`Self::send`], with the headers that concern the connection itself, for an upgrade.
    ///
    /// # Errors
    /// The node does not answer.
    pub async fn send_as_is(&self, mut request: Request<Body>, repeatable: bool) -> Result<Response<Body>, NodeError> {
        strip_credentials(request.headers_mut());
        let repeatable = repeatable || request.method().is_idempotent();
        *request.version_mut() = Version::HTTP_11;
        *request.uri_mut() = node_uri(request.uri());
        let mut response = self.client.request(request).await.map_err(|source| {
            let node = self.id.clone();
            match (source.is_connect(), repeatable) {
                (true, _) => NodeError::Unreachable { node, source },
                (false, true) => NodeError::Lost { node, source },
                (false, false) => NodeError::Unknown { node, source },
            }
        })?;
        if response.status() != 101 {
            strip_hop_headers(response.headers_mut());
        }
        Ok(response.map(Body::new))
    }

    /// A `GET` without a body.
    ///
    /// # Errors
    /// The node does not answer.
    pub async fn get(&self, path: &'static str) -> Result<Response<Body>, NodeError> {
        let mut request = Request::new(Body::empty());
        *request.method_mut() = Method::GET;
        *request.uri_mut() = Uri::from_static(path);
        self.send(request, true).await
    }
}

/// The path and query on the node. The host only names the pool.
fn node_uri(uri: &Uri) -> Uri {
    let path = uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let mut parts = axum::http::uri::Parts::default();
    parts.scheme = Some(axum::http::uri::Scheme::HTTP);
    parts.authority = Some(axum::http::uri::Authority::from_static("node"));
    parts.path_and_query = Some(path);
    Uri::from_parts(parts).unwrap_or_else(|_| Uri::from_static("http://node/"))
}

/// Removes the headers that concern one connection only (RFC 9110, 7.6.1).
fn strip_hop_headers(headers: &mut HeaderMap) {
    if let Some(named) = headers.remove(header::CONNECTION) {
        for name in named.to_str().unwrap_or_default().split(',') {
            if let Ok(name) = name.trim().parse::<HeaderName>()
                && name != header::CONTENT_LENGTH
            {
                headers.remove(name);
            }
        }
    }
    for name in [
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ] {
        headers.remove(name);
    }
}

fn strip_credentials(headers: &mut HeaderMap) {
    headers.remove(header::AUTHORIZATION);
    headers.remove(API_KEY);
    headers.remove(header::COOKIE);
    headers.remove(header::HOST);
}

#[derive(Debug, Clone)]
struct Connector {
    address: NodeAddress,
}

impl tower::Service<Uri> for Connector {
    type Response = NodeStream;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<NodeStream>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let NodeAddress::Unix(path) = self.address.clone();
        Box::pin(async move {
            // A UNIX socket whose listen queue is full refuses with EAGAIN instead of waiting (unix(7)): in a burst
            // that is a matter of milliseconds, not an error.
            let deadline = Instant::now() + CONNECT_LIMIT;
            let mut pause = Duration::from_millis(1);
            loop {
                match UnixStream::connect(&path).await {
                    Ok(stream) => return Ok(NodeStream(TokioIo::new(stream))),
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(Duration::from_millis(50));
                    }
                    Err(e) => return Err(e),
                }
            }
        })
    }
}

/// A connection to a node; TLS over TCP will be another variant of it.
#[derive(Debug)]
struct NodeStream(TokioIo<UnixStream>);

impl Connection for NodeStream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for NodeStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl Write for NodeStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, bufs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_one_connection_are_not_passed_on() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, x-hop, content-length"),
            ("x-hop", "1"),
            ("content-length", "3"),
            ("te", "trailers"),
            ("range", "bytes=0-"),
        ] {
            headers.insert(name, value.parse().unwrap());
        }
        strip_hop_headers(&mut headers);
        let mut left: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["content-length", "range"]);
    }

    #[test]
    fn the_path_and_query_are_kept() {
        let uri = node_uri(&"https://api.example/v1/x%2Fy?a=%26".parse().unwrap());
        assert_eq!(uri.to_string(), "http://node/v1/x%2Fy?a=%26");
    }
}
