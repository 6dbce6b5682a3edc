//! What a build asks of nodes: sandboxes of its own and what is done in them, over the routes that callers have.
//!
//! A create goes on in a task of its own, so that a build that is dropped meanwhile still learns of the sandbox and
//! removes it with the others.

use crate::directory::DOCUMENT_LIMIT;
use crate::refusal::Refusal;
use crate::state::{Caller, Gw, claim};
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderValue, Method, Response, header};
use corral_api::build::BUILD_LABEL;
use corral_api::digest::Digest;
use corral_api::environment::{Limits, ResolvedEnvironment};
use corral_api::ids::SandboxId;
use corral_api::image::{ImageConfig, ImageRecord, SnapshotSpec};
use corral_api::problem::{ErrorKind, Problem};
use corral_api::sandbox::{CreateOnNode, SandboxSpec, SandboxStatus};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use tokio::sync::Mutex;

/// A sandbox that nothing asks for anything any more ends by itself: its build was lost with its gateway.
const IDLE_TTL_MS: u64 = 30 * 60 * 1000;
/// How the environment of such a sandbox begins.
pub const ENVIRONMENT_PREFIX: &str = "build:";

/// The sandboxes of one build. Clones are the same bench.
#[derive(Debug, Clone)]
pub struct Bench {
    gw: Gw,
    caller: Caller,
    id: Arc<str>,
    limits: Limits,
    live: Arc<Mutex<Vec<SandboxId>>>,
}

impl Bench {
    /// A bench without sandboxes.
    pub fn new(gw: Gw, caller: Caller, id: &str, limits: Limits) -> Self {
        Self { gw, caller, id: id.into(), limits, live: Arc::default() }
    }

    /// Starts a sandbox on these layers, without any configuration.
    ///
    /// # Errors
    /// The node refuses or does not answer.
    pub async fn create(&self, layers: Vec<Digest>) -> Result<SandboxId, Refusal> {
        // Taken before the task is there: whoever clears the bench waits for it.
        let mut live = Arc::clone(&self.live).lock_owned().await;
        let this = self.clone();
        let created = tokio::spawn(async move {
            let status = this.start(layers).await?;
            live.push(status.id.clone());
            Ok(status.id)
        });
        created.await.map_err(|error| Refusal::internal("creating a sandbox for a build", &error))?
    }

    async fn start(&self, layers: Vec<Digest>) -> Result<SandboxStatus, Refusal> {
        let name = format!("{ENVIRONMENT_PREFIX}{}", self.id);
        let config = ImageConfig { workdir: "/".to_owned(), ..ImageConfig::default() };
        let spec = SandboxSpec {
            environment: Some(name.clone()),
            limits: self.limits,
            labels: [(BUILD_LABEL.to_owned(), self.id.to_string())].into(),
            idle_ttl_ms: IDLE_TTL_MS,
            ..SandboxSpec::default()
        };
        let internal = |error: serde_json::Error| Refusal::internal("writing the create", &error);
        let create = CreateOnNode {
            project_id: self.caller.project_id.to_string(),
            idempotency_key: None,
            body_digest: Digest::of(&serde_json::to_vec(&spec).map_err(internal)?),
            environment: ResolvedEnvironment { name, layers, config },
            spec,
        };
        let placing = self.gw.directory.place()?;
        let request = self.request(Method::POST, "/rpc/sandboxes", &create)?;
        read(placing.node().channel.send(request, false).await?).await
    }

    /// Removes a sandbox.
    ///
    /// # Errors
    /// The node refuses or does not answer; the sandbox stays on the bench.
    pub async fn remove(&self, id: &SandboxId) -> Result<(), Refusal> {
        self.delete(id).await?;
        self.live.lock().await.retain(|live| live != id);
        Ok(())
    }

    async fn delete(&self, id: &SandboxId) -> Result<(), Refusal> {
        match self.send(Method::DELETE, id, "", Body::empty(), None).await {
            Err(refusal) if refusal.problem.kind == ErrorKind::NotFound => Ok(()),
            other => other.map(drop),
        }
    }

    /// Removes all sandboxes, also one that is being created.
    pub async fn clear(&self) {
        let mut live = self.live.lock().await;
        for id in live.drain(..) {
            if let Err(refusal) = self.delete(&id).await {
                // It ends by itself, by its idle time or when the gateway starts anew.
                tracing::warn!(sandbox_id = %id, kind = %refusal.problem.kind, "a sandbox of a build stays for now");
            }
        }
    }

    fn request<T: Serialize>(&self, method: Method, target: &str, body: &T) -> Result<Request, Refusal> {
        let text = serde_json::to_vec(body).map_err(|error| Refusal::internal("writing a request", &error))?;
        self.raw_request(method, target, text.into(), Some("application/json"))
    }

    fn raw_request(
        &self,
        method: Method,
        target: &str,
        body: Body,
        content_type: Option<&'static str>,
    ) -> Result<Request, Refusal> {
        let mut request = Request::new(body);
        *request.method_mut() = method;
        *request.uri_mut() = target
            .parse()
            .map_err(|error: axum::http::uri::InvalidUri| Refusal::internal("naming what a build asks for", &error))?;
        if let Some(content_type) = content_type {
            request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        }
        request.extensions_mut().insert(self.caller.clone());
        claim(&mut request);
        Ok(request)
    }

    async fn send(
        &self,
        method: Method,
        id: &SandboxId,
        rest: &str,
        body: Body,
        content_type: Option<&'static str>,
    ) -> Result<Response<Body>, Refusal> {
        let gone = || Refusal::new(ErrorKind::Unavailable, "the node of a build's sandbox is not known any more");
        let node = self.gw.directory.by_hint(id.node_hint()).ok_or_else(gone)?;
        let request = self.raw_request(method, &format!("/v1/sandboxes/{id}{rest}"), body, content_type)?;
        successful(node.channel.send(request, false).await?).await
    }

    /// Sends a JSON body and returns the answer as it comes.
    ///
    /// # Errors
    /// The node refuses or does not answer.
    pub async fn post<T: Serialize>(&self, id: &SandboxId, rest: &str, body: &T) -> Result<Response<Body>, Refusal> {
        let text = serde_json::to_vec(body).map_err(|error| Refusal::internal("writing a request", &error))?;
        self.send(Method::POST, id, rest, text.into(), Some("application/json")).await
    }

    /// Whether a path is a directory, links followed; nothing when there is nothing.
    ///
    /// # Errors
    /// The node refuses or does not answer.
    pub async fn is_directory(&self, id: &SandboxId, path: &str) -> Result<Option<bool>, Refusal> {
        let rest = format!("/files/list?{}", query(&[("path", path), ("user", "0"), ("limit", "1")])?);
        match self.send(Method::GET, id, &rest, Body::empty(), None).await {
            Ok(_) => Ok(Some(true)),
            Err(refusal) => match refusal.problem.kind {
                ErrorKind::WrongFileType => Ok(Some(false)),
                ErrorKind::NotFound => Ok(None),
                _ => Err(refusal),
            },
        }
    }

    /// A small text file of the sandbox; nothing when it cannot be read.
    ///
    /// # Errors
    /// The node does not answer.
    pub async fn read_text(&self, id: &SandboxId, path: &str) -> Result<Option<String>, Refusal> {
        let rest = format!("/files?{}", query(&[("path", path), ("user", "0")])?);
        match self.send(Method::GET, id, &rest, Body::empty(), None).await {
            Ok(response) => {
                let bytes = to_bytes(response.into_body(), DOCUMENT_LIMIT).await;
                Ok(bytes.ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
            }
            Err(refusal) if refusal.problem.status < 500 => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }

    /// A directory's content, or a file, as a tar stream.
    ///
    /// # Errors
    /// The node refuses or does not answer.
    pub async fn tar_out(&self, id: &SandboxId, path: &str) -> Result<Body, Refusal> {
        let rest = format!("/files/tar?{}", query(&[("path", path), ("user", "0")])?);
        Ok(self.send(Method::GET, id, &rest, Body::empty(), None).await?.into_body())
    }

    /// Unpacks a tar stream with its owners in a directory.
    ///
    /// # Errors
    /// The node refuses or does not answer.
    pub async fn tar_in(&self, id: &SandboxId, path: &str, body: Body) -> Result<(), Refusal> {
        let rest = format!("/files/tar?{}", query(&[("path", path), ("user", "0"), ("owners", "true")])?);
        self.send(Method::PUT, id, &rest, body, Some("application/x-tar")).await.map(drop)
    }

    /// What the sandbox wrote as a layer, with the layers it stands on.
    ///
    /// # Errors
    /// The node refuses or does not answer.
    pub async fn snapshot(&self, id: &SandboxId) -> Result<ImageRecord, Refusal> {
        let name = format!("{ENVIRONMENT_PREFIX}{}", self.id);
        read(self.post(id, "/snapshots", &SnapshotSpec { name, scrub: Vec::new() }).await?).await
    }
}

fn query(pairs: &[(&str, &str)]) -> Result<String, Refusal> {
    serde_urlencoded::to_string(pairs).map_err(|error| Refusal::internal("writing a request", &error))
}

/// A problem document becomes a refusal.
async fn successful(response: Response<Body>) -> Result<Response<Body>, Refusal> {
    if response.status().is_success() {
        return Ok(response);
    }
    let body = to_bytes(response.into_body(), DOCUMENT_LIMIT).await.unwrap_or_default();
    let problem = serde_json::from_slice::<Problem>(&body)
        .unwrap_or_else(|_| Problem::new(ErrorKind::UpstreamFailed, "the node's answer to a build cannot be read"));
    Err(problem.into())
}

async fn read<T: DeserializeOwned>(response: Response<Body>) -> Result<T, Refusal> {
    let failed = || Refusal::new(ErrorKind::UpstreamFailed, "the node's answer to a build cannot be read");
    let body = to_bytes(successful(response).await?.into_body(), DOCUMENT_LIMIT).await.map_err(|_| failed())?;
    serde_json::from_slice(&body).map_err(|_| failed())
}
