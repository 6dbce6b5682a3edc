//! What passes through the gateway: keys, headers, streams, WebSockets, and what happens when either side goes away.
#![allow(clippy::unwrap_used, reason = "a test")]

mod support;

use futures_util::{SinkExt as _, StreamExt as _, stream};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use support::{Front, MIB};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;

/// What a stalled stream of any length may have taken from its source: buffers of three sockets and two servers.
const IN_FLIGHT: u64 = 16 * MIB;

async fn settled(count: impl Fn() -> u64) -> u64 {
    let mut before = count();
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = count();
        if now == before && now > 0 {
            return now;
        }
        before = now;
    }
}

#[tokio::test]
async fn everything_under_v1_needs_a_key_and_the_node_never_sees_it() {
    let front = Front::start().await;
    let http = reqwest::Client::new();
    let url = front.sandbox("");
    let wrong = format!("corral_{}", "0".repeat(40));
    for (header, value) in [
        ("x-none", String::new()),
        ("authorization", format!("Bearer {wrong}")),
        ("authorization", format!("Basic {}", front.key)),
        ("authorization", "Bearer".into()),
        ("x-api-key", "x".into()),
    ] {
        let response = http.get(&url).header(header, value).send().await.unwrap();
        assert_eq!(response.status(), 401);
        assert_eq!(response.headers()["www-authenticate"], "Bearer");
        assert_eq!(response.json::<Value>().await.unwrap()["kind"], "unauthorized");
    }
    for (header, value) in [("authorization", format!("bearer {}", front.key)), ("x-api-key", front.key.clone())] {
        let request = http.get(&url).header(header, value).header("corral-project", "other");
        let response = request.header("x-request-id", "r-7").send().await.unwrap();
        assert_eq!((response.status().as_u16(), response.headers()["x-request-id"].to_str().unwrap()), (200, "r-7"));
        let seen = front.node.seen.last_headers.lock().unwrap().clone();
        assert_eq!(seen["x-request-id"], "r-7");
        assert_eq!(seen["corral-project"], "default");
        assert!(!seen.contains_key("authorization") && !seen.contains_key("x-api-key"), "{seen:?}");
    }
    for path in ["/healthz", "/readyz", "/version", "/openapi.json", "/metrics"] {
        let response = http.get(front.url(path)).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        assert!(response.headers()["x-request-id"].to_str().unwrap().starts_with('r'));
    }
    let text = http.get(front.url("/metrics")).send().await.unwrap().text().await.unwrap();
    assert!(
        text.contains("corral_gateway_requests_total{route=\"/v1/sandboxes/{id}\",method=\"GET\",status=\"401\"} 5"),
        "{text}"
    );
    assert!(text.contains("corral_gateway_refused_keys_total 5") && text.ends_with("corral_node_live 1\n"), "{text}");
}

#[tokio::test]
async fn an_upload_of_64_mib_waits_for_its_reader() {
    let front = Front::start().await;
    let sent = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&sent);
    let piece = bytes::Bytes::from(vec![1u8; 1 << 16]);
    let body = stream::iter(0..64 * 16).map(move |_| {
        counted.fetch_add(1 << 16, Ordering::SeqCst);
        Ok::<_, std::io::Error>(piece.clone())
    });
    let request = reqwest::Client::new().put(front.sandbox("/files?path=/gated")).bearer_auth(&front.key);
    let request = tokio::spawn(request.body(reqwest::Body::wrap_stream(body)).send());
    front.node.seen.begun.notified().await;
    let held = settled(|| sent.load(Ordering::SeqCst)).await;
    assert!(held < IN_FLIGHT, "{held} bytes are held on the way to a node that reads nothing");
    front.node.seen.gate.add_permits(1);
    assert_eq!(request.await.unwrap().unwrap().status(), 200);
    assert_eq!(front.node.seen.read_bytes.load(Ordering::SeqCst), 64 * MIB);
}

#[tokio::test]
async fn a_download_of_64_mib_waits_for_its_reader_and_ends_with_it() {
    let front = Front::start().await;
    let http = reqwest::Client::new();
    let get = || http.get(front.sandbox("/files?path=/64")).bearer_auth(&front.key).send();
    let sent = || front.node.seen.sent_bytes.load(Ordering::SeqCst);
    let mut response = get().await.unwrap();
    let mut read = response.chunk().await.unwrap().unwrap().len() as u64;
    let held = settled(sent).await;
    assert!(held < IN_FLIGHT, "{held} bytes are held on the way to a client that reads nothing");
    while let Some(chunk) = response.chunk().await.unwrap() {
        read += chunk.len() as u64;
    }
    assert_eq!(read, 64 * MIB);
    drop(get().await.unwrap());
    let held = settled(sent).await;
    assert!(held < 64 * MIB + IN_FLIGHT, "the node goes on sending to nobody");
}

#[tokio::test]
async fn a_request_ends_on_the_node_when_its_client_leaves() {
    let front = Front::start().await;
    let http = reqwest::Client::new();
    let request = tokio::spawn(http.get(front.sandbox("/stats")).bearer_auth(&front.key).send());
    front.node.seen.begun.notified().await;
    request.abort();
    tokio::time::timeout(Duration::from_secs(10), front.node.seen.dropped.notified()).await.unwrap();
}

#[tokio::test]
async fn a_terminal_passes_in_both_directions_and_ends_with_its_client() {
    let front = Front::start().await;
    let url = front.sandbox("/pty?argv=/bin/sh&argv=-i&cols=80").replace("http:", "ws:");
    let mut request = url.into_client_request().unwrap();
    request.headers_mut().insert("x-api-key", front.key.parse().unwrap());
    let stream = tokio::net::TcpStream::connect(front.address).await.unwrap();
    let (mut socket, _) = tokio_tungstenite::client_async(request, stream).await.unwrap();
    assert!(socket.next().await.unwrap().unwrap().into_text().unwrap().contains("started"));
    assert!(front.node.seen.last_uri.lock().unwrap().ends_with("/pty?argv=/bin/sh&argv=-i&cols=80"));
    for size in [1, 1000, 1 << 20] {
        let bytes = vec![b'x'; size];
        socket.send(Message::Binary(bytes.clone().into())).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap().into_data(), bytes);
    }
    drop(socket);
    tokio::time::timeout(Duration::from_secs(10), front.node.seen.dropped.notified()).await.unwrap();
    let plain = reqwest::Client::new().get(front.sandbox("/pty")).bearer_auth(&front.key).send().await.unwrap();
    assert_eq!(plain.status(), 400);
}

#[tokio::test]
async fn a_node_that_is_gone_is_told_apart_from_one_that_broke_off() {
    let mut front = Front::start().await;
    let http = reqwest::Client::new();
    let exec = |body: Value| http.post(front.sandbox("/exec")).bearer_auth(&front.key).json(&body).send();
    let crash: Value = exec(json!({"argv": ["crash"]})).await.unwrap().json().await.unwrap();
    assert_eq!((crash["kind"].as_str(), crash["retryable"].as_bool()), (Some("outcome_unknown"), Some(false)));
    let crash: Value = exec(json!({"argv": ["crash"], "step_key": "1"})).await.unwrap().json().await.unwrap();
    assert_eq!((crash["kind"].as_str(), crash["retryable"].as_bool()), (Some("upstream_failed"), Some(true)));

    let url = front.sandbox("/exec");
    let other = support::FakeNode::start();
    std::mem::replace(&mut front.node, other).stop().await;
    let body = json!({"argv": ["true"]});
    let response = http.post(url).bearer_auth(&front.key).json(&body).send().await.unwrap();
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["retry-after"], "1");
    let text: Value = response.json().await.unwrap();
    assert_eq!((text["kind"].as_str(), text["retry_after_ms"].as_u64()), (Some("unavailable"), Some(1000)));
    assert!(!text.to_string().contains("sock"), "paths of the host are for the log: {text}");
    assert_eq!(http.get(front.url("/readyz")).send().await.unwrap().status(), 503);
    assert_eq!(http.get(front.url("/healthz")).send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn queries_and_event_streams_reach_the_node() {
    let front = Front::start().await;
    let http = reqwest::Client::new();
    let list = front.url("/v1/sandboxes?state=running&label=a%3Db&label=c%3Dd&limit=2");
    assert_eq!(http.get(list).bearer_auth(&front.key).send().await.unwrap().status(), 200);
    let seen = front.node.seen.last_uri.lock().unwrap().clone();
    assert!(seen.ends_with("/rpc/sandboxes?state=running&label=a%3Db&label=c%3Dd&limit=2"), "{seen}");
    let events = http.get(front.url("/v1/events?after=3")).bearer_auth(&front.key);
    let mut events = events.header("accept", "text/event-stream").header("last-event-id", "5").send().await.unwrap();
    assert_eq!(events.chunk().await.unwrap().unwrap(), "id: 1\ndata: {}\n\n");
    assert_eq!(front.node.seen.last_headers.lock().unwrap()["last-event-id"], "5");
}

#[tokio::test]
async fn http2_clients_are_forwarded_over_http1() {
    let front = Front::start().await;
    let http = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let exec = http.post(front.sandbox("/exec")).bearer_auth(&front.key).json(&json!({"argv": ["exit", "2"]}));
    let response = exec.send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.version()), (200, reqwest::Version::HTTP_2));
    assert_eq!(response.json::<Value>().await.unwrap()["exit_code"], 2);
    let put = http.put(front.sandbox("/files?path=/h2")).bearer_auth(&front.key).body(vec![5u8; 3 << 20]);
    assert_eq!(put.send().await.unwrap().status(), 200);
    let get = http.get(front.sandbox("/files?path=/h2")).bearer_auth(&front.key).send().await.unwrap();
    assert_eq!(get.bytes().await.unwrap().len(), 3 << 20);
}
