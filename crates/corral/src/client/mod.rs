//! A client to the gateway.

mod credentials;
mod lines;

pub use credentials::{Credentials, default_path, read as read_credentials, write as write_credentials};
pub use lines::Lines;

use crate::cli::ServerArgs;
use anyhow::Context as _;
use corral_api::problem::Problem;
use reqwest::{Method, RequestBuilder, Response};
use serde::de::DeserializeOwned;
use std::time::Duration;
use url::Url;

/// An error the gateway answered with.
#[derive(Debug)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// The problem document, where it can be read.
    pub problem: Option<Problem>,
    text: String,
}

impl ApiError {
    /// A problem that came inside a stream.
    pub fn of(problem: Problem) -> Self {
        Self { status: problem.status, problem: Some(problem), text: String::new() }
    }

    async fn read(response: Response) -> Self {
        let status = response.status().as_u16();
        let body = response.bytes().await.unwrap_or_default();
        let text: String = String::from_utf8_lossy(&body).chars().take(1000).collect();
        Self { status, problem: serde_json::from_slice(&body).ok(), text }
    }

    /// It as JSON.
    pub fn document(&self) -> serde_json::Value {
        serde_json::to_value(&self.problem)
            .ok()
            .filter(|value| !value.is_null())
            .or_else(|| serde_json::from_str(&self.text).ok())
            .unwrap_or_else(|| serde_json::json!({ "status": self.status, "message": self.text }))
    }

    /// How long to wait before the same request may succeed.
    pub fn retry_after(&self) -> Option<Duration> {
        let problem = self.problem.as_ref().filter(|problem| problem.retryable)?;
        Some(Duration::from_millis(problem.retry_after_ms.unwrap_or(500).min(5000)))
    }
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.problem {
            Some(problem) => {
                f.write_str(&problem.message)?;
                match &problem.request_id {
                    Some(id) if problem.status >= 500 => write!(f, " (request {id})"),
                    _ => Ok(()),
                }
            }
            None if self.text.is_empty() => write!(f, "the server answered with status {}", self.status),
            None => write!(f, "the server answered with status {}: {}", self.status, self.text),
        }
    }
}

impl std::error::Error for ApiError {}

/// A client to one gateway with one key.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    base: Url,
    key: String,
}

impl Client {
    /// A client from options, environment and credentials file, in this order.
    ///
    /// # Errors
    /// No URL or key is known, or they cannot be used.
    pub fn new(args: &ServerArgs) -> anyhow::Result<Self> {
        let (url, key) = match (&args.api_url, &args.api_key) {
            (Some(url), Some(key)) => (url.clone(), key.clone()),
            (url, key) => {
                let path = args.credentials.clone().map_or_else(default_path, Ok)?;
                let kept = read_credentials(&path)?.with_context(|| {
                    let path = path.display();
                    format!(
                        "no credentials: run `corral up`, or set CORRAL_API_URL and CORRAL_API_KEY ({path} is missing)"
                    )
                })?;
                (url.clone().unwrap_or(kept.url), key.clone().unwrap_or(kept.key))
            }
        };
        let base = Url::parse(&url).with_context(|| format!("{url:?} is not a URL"))?;
        anyhow::ensure!(matches!(base.scheme(), "http" | "https"), "{url:?}: http or https is needed");
        // Upgrades to WebSocket need HTTP/1.1. A sandbox's commands take any time: only connecting is limited.
        let mut http = reqwest::Client::builder().http1_only().no_proxy().connect_timeout(Duration::from_secs(10));
        if let Some(path) = &args.ca_cert {
            let pem = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
            let certificates = reqwest::Certificate::from_pem_bundle(&pem)
                .with_context(|| format!("{} holds no PEM certificate", path.display()))?;
            http = http.tls_certs_merge(certificates);
        }
        Ok(Self { http: http.build().context("cannot set up the HTTP client")?, base, key })
    }

    /// A request; the segments of the path are encoded.
    pub fn call(&self, method: Method, segments: &[&str]) -> RequestBuilder {
        let mut url = self.base.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(segments);
        }
        self.http.request(method, url).bearer_auth(&self.key)
    }

    /// `GET`.
    pub fn get(&self, segments: &[&str]) -> RequestBuilder {
        self.call(Method::GET, segments)
    }

    /// `POST`.
    pub fn post(&self, segments: &[&str]) -> RequestBuilder {
        self.call(Method::POST, segments)
    }

    /// `PUT`.
    pub fn put(&self, segments: &[&str]) -> RequestBuilder {
        self.call(Method::PUT, segments)
    }

    /// `DELETE`.
    pub fn delete(&self, segments: &[&str]) -> RequestBuilder {
        self.call(Method::DELETE, segments)
    }

    /// Where requests go.
    pub fn base(&self) -> &Url {
        &self.base
    }
}

/// Sends a request and reads the head of the answer.
///
/// # Errors
/// The server cannot be reached, or refuses ([`ApiError`]).
pub async fn send(request: RequestBuilder) -> anyhow::Result<Response> {
    let response = request.send().await.map_err(unreachable)?;
    if response.status().is_success() || response.status().as_u16() == 101 {
        return Ok(response);
    }
    Err(ApiError::read(response).await.into())
}

/// Sends a request and reads the JSON answer.
///
/// # Errors
/// The server cannot be reached, refuses, or answers nonsense.
pub async fn fetch<T: DeserializeOwned>(request: RequestBuilder) -> anyhow::Result<T> {
    let body = send(request).await?.bytes().await.context("the answer broke off")?;
    serde_json::from_slice(&body).context("the server's answer cannot be read")
}

/// Reads all pages of a list. `split` takes a page apart: what is on it, and its `next_cursor`.
///
/// # Errors
/// As [`fetch`].
pub async fn fetch_pages<P: DeserializeOwned, T>(
    request: impl Fn() -> RequestBuilder,
    split: impl Fn(P) -> (Vec<T>, Option<String>),
) -> anyhow::Result<Vec<T>> {
    let mut all = Vec::new();
    let mut cursor: Option<String> = None;
    loop {
        let (page, next) = split(fetch(request().query(&[("cursor", &cursor)])).await?);
        all.extend(page);
        if next.is_none() || next == cursor {
            return Ok(all);
        }
        cursor = next;
    }
}

fn unreachable(error: reqwest::Error) -> anyhow::Error {
    let at = error.url().map(|url| url.origin().ascii_serialization()).unwrap_or_default();
    let text = if error.is_connect() {
        format!("cannot reach {at}: is `corral up` running?")
    } else {
        format!("the request to {at} failed")
    };
    anyhow::Error::new(error.without_url()).context(text)
}
