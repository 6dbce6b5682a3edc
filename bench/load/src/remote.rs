//! A shared store that is far away: a directory store behind S3's protocol, each request answered late.
//!
//! As much of the protocol as a node asks that reads layers and keeps traces. No signatures are checked.

use anyhow::Result;
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CONTENT_LENGTH, CONTENT_RANGE, ETAG, IF_NONE_MATCH, LAST_MODIFIED, RANGE};
use axum::http::{HeaderMap, Method, Response, StatusCode};
use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimePrinter;
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use tokio::io::{AsyncBufReadExt as _, BufReader};

const BUCKET: &str = "/layers";
/// The longest trace that is taken.
const MOST_PUT: usize = 64 << 20;

struct Remote {
    root: PathBuf,
    latency: Duration,
    traces: bool,
    requests: AtomicU64,
    sent_bytes: AtomicU64,
}

/// Serves until standard input ends: prints its port, and for each line that it is given what went through.
///
/// # Errors
/// When no port can be had.
pub async fn serve(root: PathBuf, latency_ms: u64, traces: bool) -> Result<()> {
    let (requests, sent_bytes) = Default::default();
    let latency = Duration::from_millis(latency_ms);
    let remote = Arc::new(Remote { root, latency, traces, requests, sent_bytes });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?.port());
    let app = Router::new().fallback(answer).with_state(Arc::clone(&remote));
    tokio::spawn(async move { axum::serve(listener, app).await });
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while lines.next_line().await?.is_some() {
        let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
        println!("{}", json!({"requests": count(&remote.requests), "sent_bytes": count(&remote.sent_bytes)}));
    }
    Ok(())
}

async fn answer(State(remote): State<Arc<Remote>>, request: Request) -> Response<Body> {
    tokio::time::sleep(remote.latency).await;
    remote.requests.fetch_add(1, Ordering::Relaxed);
    let answer = remote.answer(request).await;
    answer.unwrap_or_else(|error| problem(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()))
}

impl Remote {
    async fn answer(&self, request: Request) -> Result<Response<Body>> {
        let (head, body) = request.into_parts();
        let path = percent_encoding::percent_decode_str(head.uri.path()).decode_utf8()?.into_owned();
        let key = path.strip_prefix(BUCKET).unwrap_or(&path).trim_matches('/').to_owned();
        let query: Vec<(String, String)> =
            url::form_urlencoded::parse(head.uri.query().unwrap_or("").as_bytes()).into_owned().collect();
        let asked = |name: &str| query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        let at = self.root.join(&key);
        // A cold run stays cold.
        let is_hidden = !self.traces && key.contains("/traces/");
        let conditional = head.headers.contains_key(IF_NONE_MATCH);
        match head.method {
            Method::GET if key.is_empty() => Ok(xml(StatusCode::OK, list(&self.root, asked("prefix").unwrap_or(""))?)),
            Method::GET | Method::HEAD if is_hidden || !at.is_file() => Ok(problem(StatusCode::NOT_FOUND, "NoSuchKey")),
            Method::GET => self.object(&at, &head.headers, true).await,
            Method::HEAD => self.object(&at, &head.headers, false).await,
            Method::POST if asked("uploads").is_some() => {
                Ok(xml(StatusCode::OK, element("InitiateMultipartUploadResult", &element("UploadId", "1"))))
            }
            // Nothing is published here: a whole upload is refused as one that is there already.
            Method::PUT if asked("partNumber").is_some() => Ok(stored()),
            Method::POST if conditional => Ok(problem(StatusCode::PRECONDITION_FAILED, "PreconditionFailed")),
            Method::PUT if conditional && at.exists() => {
                Ok(problem(StatusCode::PRECONDITION_FAILED, "PreconditionFailed"))
            }
            Method::PUT => {
                if !is_hidden {
                    let content = axum::body::to_bytes(body, MOST_PUT).await?;
                    tokio::fs::create_dir_all(at.parent().unwrap_or(&self.root)).await?;
                    tokio::fs::write(&at, content).await?;
                }
                Ok(stored())
            }
            Method::DELETE => Ok(Response::builder().status(StatusCode::NO_CONTENT).body(Body::empty())?),
            _ => Ok(problem(StatusCode::NOT_IMPLEMENTED, "NotImplemented")),
        }
    }

    async fn object(&self, at: &Path, headers: &HeaderMap, with_body: bool) -> Result<Response<Body>> {
        let (at, asked) = (at.to_owned(), headers.get(RANGE).cloned());
        // In one go on a thread for it: an answer is to be late by the latency, and by little more.
        let read = move || -> Result<_> {
            let file = File::open(at)?;
            let told = file.metadata()?;
            let range = asked.and_then(|value| range(value.to_str().ok()?, told.len()));
            let (begin, end) = range.unwrap_or((0, told.len()));
            let mut content = vec![0; if with_body { (end - begin) as usize } else { 0 }];
            file.read_exact_at(&mut content, begin)?;
            Ok((told, range, content))
        };
        let (told, range, content) = tokio::task::spawn_blocking(read).await??;
        let (begin, end) = range.unwrap_or((0, told.len()));
        let mut response = Response::builder()
            .header(CONTENT_LENGTH, end - begin)
            .header(ETAG, "\"whole\"")
            .header(LAST_MODIFIED, http_date(told.modified()?)?);
        if range.is_some() {
            let text = format!("bytes {begin}-{}/{}", end - 1, told.len());
            response = response.status(StatusCode::PARTIAL_CONTENT).header(CONTENT_RANGE, text);
        }
        self.sent_bytes.fetch_add(content.len() as u64, Ordering::Relaxed);
        Ok(response.body(Body::from(content))?)
    }
}

/// Begin and end, exclusive, of `bytes=FROM-TO`.
fn range(text: &str, size: u64) -> Option<(u64, u64)> {
    let (from, to) = text.strip_prefix("bytes=")?.split_once('-')?;
    let (from, to) = (from.parse().ok()?, to.parse::<u64>().ok()?);
    (from <= to && from < size).then_some((from, (to + 1).min(size)))
}

fn http_date(time: SystemTime) -> Result<String> {
    Ok(DateTimePrinter::new().timestamp_to_rfc9110_string(&Timestamp::try_from(time)?)?)
}

/// What lies below a prefix.
fn list(root: &Path, prefix: &str) -> Result<String> {
    let mut found = Vec::new();
    let mut pending = vec![root.join(prefix.rsplit_once('/').map_or("", |(directory, _)| directory))];
    while let Some(directory) = pending.pop() {
        let Ok(entries) = std::fs::read_dir(&directory) else { continue };
        for entry in entries {
            let entry = entry?;
            let path = entry.path();
            let key = path.strip_prefix(root)?.to_string_lossy().into_owned();
            if entry.file_type()?.is_dir() {
                pending.push(path);
            } else if key.starts_with(prefix) && !key.starts_with('.') {
                let told = entry.metadata()?;
                found.push((key, told.len(), told.modified()?));
            }
        }
    }
    found.sort();
    let entry = |(key, size, modified): &(String, u64, SystemTime)| {
        let when = Timestamp::try_from(*modified)?.to_string();
        let parts = [("Key", key.as_str()), ("LastModified", &when), ("ETag", "whole"), ("Size", &size.to_string())];
        Ok(element("Contents", &parts.map(|(name, text)| element(name, text)).concat()))
    };
    let entries = found.iter().map(entry).collect::<Result<String>>()?;
    Ok(element("ListBucketResult", &(element("IsTruncated", "false") + &entries)))
}

/// Keys of a store need no escapes.
fn element(name: &str, inside: &str) -> String {
    format!("<{name}>{inside}</{name}>")
}

fn xml(status: StatusCode, text: String) -> Response<Body> {
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response
}

fn problem(status: StatusCode, code: &str) -> Response<Body> {
    xml(status, element("Error", &element("Code", code)))
}

fn stored() -> Response<Body> {
    let mut response = Response::new(Body::empty());
    response.headers_mut().insert(ETAG, axum::http::HeaderValue::from_static("\"whole\""));
    response
}
