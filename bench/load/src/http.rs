//! One kept-alive HTTP/1.1 connection to a gateway (TCP) or a Docker engine (UNIX socket).

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::Value;

/// Where requests go.
#[derive(Debug, Clone)]
pub enum Target {
    /// A Corral gateway at `host:port`, with its key.
    Gateway {
        /// `host:port`.
        address: String,
        /// API key.
        key: String,
    },
    /// A Docker engine's socket.
    Docker {
        /// Path.
        socket: String,
    },
}

/// A connection.
#[derive(Debug)]
pub struct Connection {
    sender: SendRequest<Full<Bytes>>,
    key: Option<String>,
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// When nobody listens.
    pub async fn open(target: &Target) -> Result<Self> {
        let (sender, key) = match target {
            Target::Gateway { address, key } => {
                let stream = tokio::net::TcpStream::connect(address).await.context("connect to the gateway")?;
                stream.set_nodelay(true)?;
                let (sender, connection) = handshake(TokioIo::new(stream)).await?;
                tokio::spawn(connection);
                (sender, Some(key.clone()))
            }
            Target::Docker { socket } => {
                let stream = tokio::net::UnixStream::connect(socket).await.context("connect to the engine")?;
                let (sender, connection) = handshake(TokioIo::new(stream)).await?;
                tokio::spawn(connection);
                (sender, None)
            }
        };
        Ok(Self { sender, key })
    }

    /// Sends a request and reads its whole answer; an error status is an error.
    ///
    /// # Errors
    /// A broken connection or an error status.
    pub async fn call(&mut self, method: Method, path: &str, body: Option<&Value>) -> Result<Bytes> {
        let bytes = body.map(|b| b.to_string()).unwrap_or_default();
        let mut request = Request::builder().method(method.clone()).uri(path).header("host", "localhost");
        if body.is_some() {
            request = request.header("content-type", "application/json");
        }
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        self.sender.ready().await?;
        let response = self.sender.send_request(request.body(Full::new(Bytes::from(bytes)))?).await?;
        let status = response.status();
        let answer = response.into_body().collect().await?.to_bytes();
        if !status.is_success() {
            bail!("{method} {path}: {status}: {}", String::from_utf8_lossy(&answer));
        }
        Ok(answer)
    }

    /// As [`Self::call`], for JSON answers.
    ///
    /// # Errors
    /// As `call`, and an answer that is no JSON.
    pub async fn json(&mut self, method: Method, path: &str, body: Option<&Value>) -> Result<Value> {
        Ok(serde_json::from_slice(&self.call(method, path, body).await?)?)
    }
}
