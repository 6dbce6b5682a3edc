//! The fake node's answers.

use super::{Node, image, layer_record};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::ws::{Message, WebSocketUpgrade};
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, delete, get, post, put};
use corral_api::command::{CommandStatus, ExecEvent, ExecResult, ExecSpec, Outcome, OutputText, PtyMessage};
use corral_api::command::{StreamName, StreamStatus, Usage};
use corral_api::digest::Digest;
use corral_api::ids::{CommandId, SandboxId};
use corral_api::image::{ImportProgress, LayerKind};
use corral_api::problem::{ErrorKind, Problem};
use corral_api::sandbox::{CreateOnNode, SandboxStatus, State as Life};
use futures_util::{StreamExt as _, stream};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use tokio::sync::Notify;
pub fn router() -> Router<Node> {
    Router::new()
        .route("/rpc/status", get(status))
        .route("/rpc/metrics", get(|| async { "# TYPE corral_node_live gauge\ncorral_node_live 1\n" }))
        .route("/rpc/sandboxes", post(create).get(list))
        .route("/rpc/events", get(events))
        .route("/rpc/images", put(import))
        .route("/rpc/layers", put(build))
        .route("/rpc/layers/{digest}", delete(delete_layer))
        .route("/v1/sandboxes/{id}", get(get_sandbox).delete(remove))
        .route("/v1/sandboxes/{id}/pause", post(get_sandbox))
        .route("/v1/sandboxes/{id}/exec", post(exec))
        .route("/v1/sandboxes/{id}/files", get(download).put(upload))
        .route("/v1/sandboxes/{id}/files/stat", get(stat))
        .route("/v1/sandboxes/{id}/files/mkdir", post(|| async { file_status("/made", "directory") }))
        .route("/v1/sandboxes/{id}/files/tar", get(read_tar).put(write_tar))
        .route("/v1/sandboxes/{id}/commands/{command}/stdin", post(stdin))
        .route("/v1/sandboxes/{id}/pty", any(pty))
        .route("/v1/sandboxes/{id}/stats", get(slow))
        .layer(axum::extract::DefaultBodyLimit::disable())
}

fn problem(kind: ErrorKind, text: &str) -> Response {
    let status = StatusCode::from_u16(kind.status()).unwrap();
    let body = serde_json::to_vec(&Problem::new(kind, text)).unwrap();
    (status, [("content-type", "application/problem+json")], body).into_response()
}

fn sandbox(id: SandboxId, environment: &str, labels: BTreeMap<String, String>) -> SandboxStatus {
    SandboxStatus {
        id,
        project_id: "default".into(),
        state: Life::Running,
        environment: environment.into(),
        labels,
        limits: corral_api::environment::Limits::default(),
        created_at: "2026-01-01T00:00:00Z".into(),
        started_at: None,
        ended_at: None,
        end: None,
        idle_ttl_ms: 0,
        max_ttl_ms: 0,
        auto_resume: true,
        entrypoint_command_id: None,
    }
}

async fn status(State(node): State<Node>) -> Response {
    axum::Json(corral_api::node::NodeStatus {
        id: node.id.clone(),
        accepting: true,
        live: 1,
        max_live: 10,
        queued: 0,
        cpus: 2,
        memory_bytes: 1 << 30,
        memory_available_bytes: 1 << 29,
        disk_bytes: 1 << 30,
        disk_available_bytes: 1 << 29,
        version: "test".into(),
    })
    .into_response()
}

async fn create(State(node): State<Node>, headers: HeaderMap, axum::Json(body): axum::Json<CreateOnNode>) -> Response {
    *node.last_headers.lock().unwrap() = headers;
    let now = node.creating.fetch_add(1, Ordering::SeqCst) + 1;
    node.most_creating.fetch_max(now, Ordering::SeqCst);
    node.creates.lock().unwrap().push(body.clone());
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
    node.creating.fetch_sub(1, Ordering::SeqCst);
    if body.spec.labels.contains_key("full") {
        return problem(ErrorKind::Overloaded, "full");
    }
    let made = sandbox(SandboxId::new(&node.id), &body.environment.name, body.spec.labels);
    (StatusCode::CREATED, axum::Json(made)).into_response()
}

async fn list(State(node): State<Node>, request: Request) -> Response {
    *node.last_uri.lock().unwrap() = request.uri().to_string();
    let sandboxes = vec![sandbox(SandboxId::new(&node.id), "base", BTreeMap::new())];
    axum::Json(corral_api::sandbox::SandboxPage { sandboxes, next_cursor: None }).into_response()
}

async fn get_sandbox(State(node): State<Node>, Path(id): Path<SandboxId>, request: Request) -> Response {
    *node.last_headers.lock().unwrap() = request.headers().clone();
    axum::Json(sandbox(id, "base", BTreeMap::new())).into_response()
}

async fn remove(State(node): State<Node>, Path(id): Path<SandboxId>) -> Response {
    node.removed.lock().unwrap().push(id.to_string());
    axum::Json(sandbox(id, "base", BTreeMap::new())).into_response()
}

struct OnDrop<'a>(&'a Notify, bool);
impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        if self.1 {
            self.0.notify_one();
        }
    }
}

async fn slow(State(node): State<Node>) -> Response {
    let mut guard = OnDrop(&node.dropped, true);
    node.begun.notify_one();
    node.gate.acquire().await.unwrap().forget();
    guard.1 = false;
    axum::Json(corral_api::sandbox::SandboxStats::default()).into_response()
}

fn command(argv: Vec<String>, end: Option<Outcome>) -> CommandStatus {
    CommandStatus {
        id: "c0123456789abcdef".parse::<CommandId>().unwrap(),
        session_id: None,
        argv,
        step_key: None,
        running: end.is_none(),
        cause: None,
        end,
        stdout: StreamStatus::default(),
        stderr: StreamStatus::default(),
        usage: Some(Usage::default()),
        started_at: "2026-01-01T00:00:00Z".into(),
        ended_at: None,
    }
}

/// `exit N`, `kill N`, `hang`, `crash`, `missing`; anything else is echoed.
async fn exec(
    State(node): State<Node>,
    Query(query): Query<HashMap<String, String>>,
    axum::Json(spec): axum::Json<ExecSpec>,
) -> Response {
    node.execs.lock().unwrap().push(spec.clone());
    let words: Vec<&str> = spec.argv.iter().map(String::as_str).collect();
    let end = match words.as_slice() {
        ["exit", code] => Outcome::Exited { code: code.parse().unwrap() },
        ["kill", signal] => Outcome::Signaled { signal: signal.parse().unwrap(), name: "SIG".into(), oom: false },
        ["missing"] => return problem(ErrorKind::CommandNotStarted, "no such program"),
        // The task ends without an answer, as when a node is killed.
        ["crash"] => panic!("fake node crash"),
        ["hang"] => {
            node.begun.notify_one();
            node.gate.acquire().await.unwrap().forget();
            Outcome::Exited { code: 0 }
        }
        _ => Outcome::Exited { code: 0 },
    };
    let text = format!("{}\n", words.join(" "));
    let status = command(spec.argv.clone(), Some(end.clone()));
    if spec.background {
        return (StatusCode::ACCEPTED, axum::Json(command(spec.argv.clone(), None))).into_response();
    }
    if words == ["cat"] {
        return cat(node, status);
    }
    if query.get("stream").is_some_and(|v| v == "true") {
        let output = |stream, text: &str| ExecEvent::Output {
            stream,
            offset: 0,
            base64: data_encoding::BASE64.encode(text.as_bytes()),
        };
        let lines = [
            ExecEvent::Started { command_id: status.id.clone() },
            output(StreamName::Stdout, &text),
            output(StreamName::Stderr, "to stderr\n"),
            ExecEvent::Ended { command: status },
        ];
        let lines: Vec<_> =
            lines.iter().map(|l| Ok::<_, std::io::Error>(serde_json::to_string(l).unwrap() + "\n")).collect();
        return ([("content-type", "application/x-ndjson")], Body::from_stream(stream::iter(lines))).into_response();
    }
    let text = |t: &str| OutputText { text: Some(t.into()), base64: None, complete: true };
    axum::Json(ExecResult {
        exit_code: end.shell_status(),
        command: status,
        stdout: text(&text_of(&words)),
        stderr: text("to stderr\n"),
    })
    .into_response()
}

/// Streams that it started, waits for standard input, and streams that.
fn cat(node: Node, status: CommandStatus) -> Response {
    let line = |event: &ExecEvent| Ok::<_, std::io::Error>(serde_json::to_string(event).unwrap() + "\n");
    let started = line(&ExecEvent::Started { command_id: status.id.clone() });
    let rest = async move {
        node.gate.acquire().await.unwrap().forget();
        let base64 = data_encoding::BASE64.encode(&node.files.lock().unwrap()["stdin"]);
        let output = line(&ExecEvent::Output { stream: StreamName::Stdout, offset: 0, base64 });
        stream::iter([output, line(&ExecEvent::Ended { command: status })])
    };
    let lines = stream::iter([started]).chain(stream::once(rest).flatten());
    ([("content-type", "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

fn text_of(words: &[&str]) -> String {
    format!("{}\n", words.join(" "))
}

async fn stdin(State(node): State<Node>, body: Bytes) -> StatusCode {
    node.files.lock().unwrap().entry("stdin".into()).or_default().extend_from_slice(&body);
    node.gate.add_permits(1);
    StatusCode::NO_CONTENT
}

/// Sends `path` MiB in pieces of 64 KiB and counts what was taken from it.
async fn download(State(node): State<Node>, Query(query): Query<HashMap<String, String>>) -> Response {
    if let Some(bytes) = node.files.lock().unwrap().get(&query["path"]) {
        return bytes.clone().into_response();
    }
    let pieces = query["path"].trim_start_matches('/').parse::<u64>().unwrap() * 16;
    let piece = Bytes::from(vec![7u8; 1 << 16]);
    let body = stream::iter(0..pieces).map(move |_| {
        node.sent_bytes.fetch_add(1 << 16, Ordering::SeqCst);
        Ok::<_, std::io::Error>(piece.clone())
    });
    Body::from_stream(body).into_response()
}

/// Reads nothing until the gate opens, then counts.
async fn upload(State(node): State<Node>, Query(query): Query<HashMap<String, String>>, body: Body) -> Response {
    node.begun.notify_one();
    if query["path"] == "/gated" {
        node.gate.acquire().await.unwrap().forget();
    }
    let mut body = body.into_data_stream();
    let mut kept = Vec::new();
    while let Some(chunk) = body.next().await {
        let Ok(chunk) = chunk else { return problem(ErrorKind::InvalidRequest, "the upload broke off") };
        node.read_bytes.fetch_add(chunk.len() as u64, Ordering::SeqCst);
        if query["path"] != "/gated" {
            kept.extend_from_slice(&chunk);
        }
    }
    node.files.lock().unwrap().insert(query["path"].clone(), kept);
    file_status(&query["path"], "file")
}

fn file_status(path: &str, file_type: &str) -> Response {
    axum::Json(serde_json::json!({
        "path": path, "file_type": file_type, "size_bytes": 0, "mode": 420, "uid": 0, "gid": 0, "mtime_ms": 0
    }))
    .into_response()
}

/// A path that was written is a file, `/dir` a directory.
async fn stat(State(node): State<Node>, Query(query): Query<HashMap<String, String>>) -> Response {
    match query["path"].as_str() {
        path if node.files.lock().unwrap().contains_key(path) => file_status(path, "file"),
        "/dir" => file_status("/dir", "directory"),
        _ => problem(ErrorKind::NotFound, "no such file"),
    }
}

async fn write_tar(State(node): State<Node>, Query(query): Query<HashMap<String, String>>, body: Bytes) -> StatusCode {
    node.files.lock().unwrap().insert(format!("tar:{}", query["path"]), body.to_vec());
    StatusCode::NO_CONTENT
}

async fn read_tar(State(node): State<Node>, Query(query): Query<HashMap<String, String>>) -> Response {
    node.files.lock().unwrap().get(&format!("tar:{}", query["path"])).cloned().unwrap_or_default().into_response()
}

async fn import(State(node): State<Node>, Query(query): Query<HashMap<String, String>>, body: Bytes) -> Response {
    *node.last_uri.lock().unwrap() = serde_json::to_string(&query).unwrap();
    node.read_bytes.fetch_add(body.len() as u64, Ordering::SeqCst);
    if body.starts_with(b"broken") {
        let refused = Problem::new(ErrorKind::InvalidImage, "not an archive");
        return ndjson(&[ImportProgress::Failed { problem: refused }]);
    }
    let made = image(&query["name"], &body);
    ndjson(&[ImportProgress::Planned { layers: 1, bytes: 5 }, ImportProgress::Imported { image: made }])
}

async fn build(body: Bytes) -> Response {
    ndjson(&[ImportProgress::Built { layer: layer_record(&body, LayerKind::Toolkit) }])
}

/// Lines in pieces that cut them in the middle.
fn ndjson(lines: &[ImportProgress]) -> Response {
    let text: String = lines.iter().map(|l| serde_json::to_string(l).unwrap() + "\n").collect();
    let pieces: Vec<_> = text.as_bytes().chunks(50).map(|c| Ok::<_, std::io::Error>(c.to_vec())).collect();
    ([("content-type", "application/x-ndjson")], Body::from_stream(stream::iter(pieces))).into_response()
}

async fn delete_layer(State(node): State<Node>, Path(digest): Path<String>) -> Response {
    if digest == Digest::of(b"in use").to_string() {
        return problem(ErrorKind::Conflict, "a sandbox uses the layer");
    }
    node.removed.lock().unwrap().push(digest);
    StatusCode::NO_CONTENT.into_response()
}

/// One event, then silence.
async fn events(State(node): State<Node>, request: Request) -> Response {
    *node.last_headers.lock().unwrap() = request.headers().clone();
    let first = stream::iter([Ok::<_, std::io::Error>("id: 1\ndata: {}\n\n")]);
    let body = Body::from_stream(first.chain(stream::pending()));
    ([("content-type", "text/event-stream")], body).into_response()
}

/// Echoes; `exit` on a line of its own ends it with 7.
async fn pty(State(node): State<Node>, uri: axum::http::Uri, upgrade: WebSocketUpgrade) -> Response {
    *node.last_uri.lock().unwrap() = uri.to_string();
    upgrade.on_upgrade(|mut socket| async move {
        let started = PtyMessage::Started { command_id: "c0123456789abcdef".parse().unwrap() };
        socket.send(Message::Text(serde_json::to_string(&started).unwrap().into())).await.unwrap();
        while let Some(Ok(message)) = socket.recv().await {
            match message {
                Message::Binary(bytes) if bytes.starts_with(b"exit") => {
                    let ended = PtyMessage::Ended { outcome: Outcome::Exited { code: 7 }, exit_code: 7 };
                    socket.send(Message::Text(serde_json::to_string(&ended).unwrap().into())).await.unwrap();
                    return;
                }
                Message::Binary(_) | Message::Text(_) => socket.send(message).await.unwrap(),
                _ => {}
            }
        }
        node.dropped.notify_one();
    })
}
