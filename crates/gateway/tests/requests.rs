//! What the gateway makes of requests: refusals as problem documents, creates, batches, records.
#![allow(clippy::unwrap_used, reason = "a test")]

mod support;

use corral_api::digest::Digest;
use corral_gateway::GatewayConfig;
use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use support::Front;

struct Client<'a>(&'a Front, reqwest::Client);

impl<'a> Client<'a> {
    fn new(front: &'a Front) -> Self {
        Self(front, reqwest::Client::new())
    }
    fn call(&self, method: &str, path: &str) -> RequestBuilder {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        self.1.request(method, self.0.url(path)).bearer_auth(&self.0.key)
    }
    async fn problem(&self, request: RequestBuilder, status: u16, kind: &str) -> String {
        let response = request.send().await.unwrap();
        let id = response.headers()["x-request-id"].to_str().unwrap().to_owned();
        assert_eq!(response.headers()["content-type"], "application/problem+json");
        let at = response.url().to_string();
        let got = response.status().as_u16();
        let body: Value = response.json().await.unwrap();
        assert_eq!((got, body["kind"].as_str().unwrap()), (status, kind), "{at}: {body}");
        assert_eq!((body["request_id"].as_str(), body["status"].as_u64()), (Some(&*id), Some(status.into())));
        assert_eq!(body["type"], format!("urn:corral:problem:{kind}"));
        body["message"].as_str().unwrap().to_owned()
    }
}

async fn json_of(response: Response) -> Value {
    serde_json::from_slice(&response.bytes().await.unwrap()).unwrap()
}

#[tokio::test]
async fn malformed_requests_are_problems_that_say_where() {
    let front = Front::start().await;
    let c = Client::new(&front);
    let id = front.sandbox("").split("/v1/sandboxes/").nth(1).unwrap().to_owned();
    let exec = format!("/v1/sandboxes/{id}/exec");
    for (path, body, says) in [
        ("/v1/sandboxes", "", "EOF"),
        ("/v1/sandboxes", "{", "EOF"),
        ("/v1/sandboxes", "[]", ""),
        ("/v1/sandboxes", "{}", "environment or spec is missing"),
        ("/v1/sandboxes", "{\"environment\":\"base\"} x", "trailing"),
        ("/v1/sandboxes", "{\"environment\":\"base\",\"spec\":{\"base\":\"base\"}}", "not both"),
        ("/v1/sandboxes", "{\"image\":\"base\"}", "unknown field `image`"),
        ("/v1/sandboxes", "{\"environment\":7}", "at environment: invalid type"),
        ("/v1/sandboxes", "{\"limits\":{\"memory_mib\":\"1\"}}", "at limits.memory_mib"),
        ("/v1/sandboxes", "{\"limits\":{\"memory_mib\":-1}}", "at limits.memory_mib"),
        ("/v1/sandboxes", "{\"environment\":\"base\",\"limits\":{\"memory_mib\":1}}", "limits.memory_mib is 1"),
        ("/v1/sandboxes", "{\"environment\":\"base\",\"hostname\":\"a_b\"}", "hostname"),
        ("/v1/sandboxes", "{\"environment\":\"base\",\"env\":{\"A=B\":\"\"}}", "environment variable"),
        ("/v1/sandboxes", "{\"environment\":\"base\",\"labels\":{\"a\":\"\\u0000\"}}", "control characters"),
        ("/v1/sandboxes", "\u{0}", "expected value"),
        ("/v1/sandboxes:batch", "{\"items\":[]}", "items: 0 given"),
        ("/v1/sandboxes:batch", "{\"items\":[{\"x\":1}]}", "at items[0].x"),
        (&exec, "{\"argv\":[\"a\"],\"shell\":\"b\"}", "either argv or shell"),
        (&exec, "{}", "either argv or shell"),
        (&exec, "{\"argv\":[\"a\"],\"time\":1}", "unknown field `time`"),
        ("/v1/keys", "{\"name\":\"\"}", "1–128 bytes"),
    ] {
        let request = c.call("POST", path).header("content-type", "application/json").body(body.to_owned());
        let message = c.problem(request, 400, "invalid_request").await;
        assert!(message.contains(says), "{body}: {message}");
    }
    let deep = "[".repeat(100_000);
    let request = c.call("POST", "/v1/sandboxes").header("content-type", "application/json").body(deep);
    c.problem(request, 400, "invalid_request").await;
    for content_type in ["text/plain", "application/x-www-form-urlencoded", ""] {
        let request = c.call("POST", "/v1/sandboxes").header("content-type", content_type).body("{}");
        c.problem(request, 415, "unsupported_media_type").await;
    }
    for (method, path, status, kind, says) in [
        ("GET", "/v1/nothing", 404, "not_found", "/v1/nothing"),
        ("GET", "/", 404, "not_found", "no route /"),
        ("PATCH", "/v1/sandboxes", 405, "method_not_allowed", "PATCH"),
        ("BREW", "/v1/sandboxes", 405, "method_not_allowed", "BREW"),
        ("GET", "/v1/sandboxes/x", 404, "not_found", "no sandbox \"x\""),
        ("GET", "/v1/sandboxes/szzzz0123456789", 404, "not_found", "szzzz0123456789"),
        ("GET", "/v1/sandboxes/..%2f..%2fetc/stats", 404, "not_found", "no sandbox"),
        ("GET", "/v1/images/none", 404, "not_found", "no image \"none\""),
        ("DELETE", "/v1/images/a%2Fb%3A1", 404, "not_found", "no image \"a/b:1\""),
        ("DELETE", "/v1/layers/x", 404, "not_found", "no layer \"x\""),
        ("GET", "/v1/environments/none", 404, "not_found", "no environment \"none\""),
        ("DELETE", "/v1/keys/none", 404, "not_found", "no key \"none\""),
        ("GET", "/v1/events?after=x", 400, "invalid_request", "query: after: invalid digit"),
        ("GET", "/v1/events?since=1", 400, "invalid_request", "unknown field `since`"),
        ("PUT", "/v1/layers?kind=base&at=/", 400, "invalid_request", "workspace or toolkit"),
        ("PUT", "/v1/layers?kind=toolkit&at=x", 400, "invalid_request", "absolute"),
        ("PUT", "/v1/layers?kind=tool&at=/x", 400, "invalid_request", "tool"),
        ("PUT", "/v1/images/x?kind=zip", 400, "invalid_request", "zip"),
        ("PUT", "/v1/images/sha256:x", 400, "invalid_request", "not a digest"),
        ("PUT", "/v1/images/a%20b", 400, "invalid_request", "a b"),
        ("GET", "/v1/layers?cursor=xx", 400, "invalid_request", "cursor: "),
        ("GET", "/v1/images?cursor=-x", 400, "invalid_request", "cursor: "),
        ("GET", "/v1/environments?cursor=", 400, "invalid_request", "cursor: "),
        ("PUT", "/v1/layers?kind=toolkit&at=/proc/x", 400, "invalid_request", "at: "),
        ("PUT", "/v1/layers?kind=toolkit&at=/etc/hosts", 400, "invalid_request", "at: "),
    ] {
        let message = c.problem(c.call(method, path), status, kind).await;
        assert!(message.contains(says), "{method} {path}: {message}");
        assert!(!message.contains("deserialize"), "{method} {path}: {message}");
    }
    let allow = c.call("PATCH", "/v1/sandboxes").send().await.unwrap().headers()["allow"].clone();
    assert!(allow.to_str().unwrap().contains("POST"), "{allow:?}");
    let request = c.call("GET", "/v1/nothing").header("x-request-id", "a b\"c");
    c.problem(request, 404, "not_found").await;
    let request = c.call("POST", "/v1/sandboxes").header("idempotency-key", "x".repeat(300));
    c.problem(request.json(&json!({"environment": "base"})), 400, "invalid_request").await;
}

#[tokio::test]
async fn oversized_bodies_and_heads_are_refused() {
    let front = Front::with(GatewayConfig { json_limit_bytes: 1000, ..GatewayConfig::default() }).await;
    let c = Client::new(&front);
    let large = format!("{{\"environment\":\"{}\"}}", "x".repeat(2000));
    let post = || c.call("POST", "/v1/sandboxes").header("content-type", "application/json");
    let message = c.problem(post().body(large.clone()), 413, "too_large").await;
    assert!(message.contains("1000 bytes"), "{message}");
    let pieces: Vec<_> = large.into_bytes().chunks(100).map(|c| Ok::<_, std::io::Error>(c.to_vec())).collect();
    let chunked = reqwest::Body::wrap_stream(futures_util::stream::iter(pieces));
    c.problem(post().body(chunked), 413, "too_large").await;
    c.problem(c.call("GET", "/v1/sandboxes").header("x-filler", "y".repeat(40_000)), 413, "too_large").await;
    c.problem(c.call("GET", &format!("/v1/sandboxes?limit={}", "1".repeat(40_000))), 413, "too_large").await;
}

#[tokio::test]
async fn a_create_carries_its_key_digest_and_resolved_environment() {
    let front = Front::start().await;
    let c = Client::new(&front);
    for body in [
        "{\"environment\":\"base\",\"env\":{\"A\":\"1\"}}",
        "{ \"env\": {\"A\": \"1\"}, \"environment\": \"base\" }",
        "{\"environment\":\"base\",\"env\":{\"A\":\"2\"}}",
    ] {
        let request = c.call("POST", "/v1/sandboxes").header("content-type", "application/json");
        let response = request.header("idempotency-key", "k1").body(body).send().await.unwrap();
        assert_eq!(response.status(), 201);
        assert_eq!(json_of(response).await["environment"], "base");
    }
    let creates = front.node.seen.creates.lock().unwrap().clone();
    assert_eq!(creates[0].idempotency_key.as_deref(), Some("k1"));
    assert_eq!(creates[0].project_id, "default");
    assert_eq!(creates[0].environment.layers, [Digest::of(b"layer")]);
    assert_eq!(creates[0].environment.config.env["A"], "1");
    assert_eq!(creates[0].body_digest, creates[1].body_digest, "the same body in another order");
    assert_ne!(creates[0].body_digest, creates[2].body_digest);
    let request = c.call("POST", "/v1/sandboxes").json(&json!({"environment": "nope"}));
    let message = c.problem(request, 404, "not_found").await;
    assert_eq!(message, "there is no environment or image \"nope\"");
    let request = c.call("POST", "/v1/sandboxes").json(&json!({"spec": {"base": "nope"}}));
    assert!(c.problem(request, 404, "not_found").await.contains("no image \"nope\""));
}

#[tokio::test]
async fn a_batch_answers_for_each_item_in_order() {
    let front = Front::with(GatewayConfig { batch_concurrency: 4, ..GatewayConfig::default() }).await;
    let c = Client::new(&front);
    let item = |n: usize| match n % 3 {
        0 => json!({"environment": "base", "labels": {"n": n.to_string()}}),
        1 => json!({"environment": "base", "labels": {"full": ""}}),
        _ => json!({"environment": "missing"}),
    };
    let items: Vec<_> = (0..60).map(item).collect();
    let request = c.call("POST", "/v1/sandboxes:batch").header("idempotency-key", "b");
    let body = json_of(request.json(&json!({"items": items})).send().await.unwrap()).await;
    for (n, item) in body["items"].as_array().unwrap().iter().enumerate() {
        match n % 3 {
            0 => assert_eq!(item["sandbox"]["labels"]["n"], n.to_string()),
            1 => assert_eq!(item["problem"]["kind"], "overloaded"),
            _ => assert_eq!(item["problem"]["message"], "there is no environment or image \"missing\""),
        }
    }
    let seen = &front.node.seen;
    let mut keys: Vec<_> = seen.creates.lock().unwrap().iter().map(|c| c.idempotency_key.clone().unwrap()).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!((keys.len(), keys[0].as_str()), (40, "b#0"));
    let most = seen.most_creating.load(Ordering::SeqCst);
    assert!((2..=4).contains(&most), "{most} at the same time");
}

#[tokio::test]
async fn a_burst_of_creates_loses_none() {
    let front = Front::start().await;
    let c = Client::new(&front);
    let create = |_| async {
        let response = c.call("POST", "/v1/sandboxes").json(&json!({"environment": "base"})).send().await.unwrap();
        assert_eq!(response.status(), 201);
        json_of(response).await["id"].as_str().unwrap().to_owned()
    };
    let mut ids = futures_util::future::join_all((0..2000).map(create)).await;
    ids.sort_unstable();
    ids.dedup();
    assert_eq!((ids.len(), front.node.seen.creates.lock().unwrap().len()), (2000, 2000));
}

#[tokio::test]
async fn imports_are_recorded_and_references_protect_them() {
    let front = Front::start().await;
    let c = Client::new(&front);
    let name = "docker.io%2Flibrary%2Fpython%3A3.12";
    let put = c.call("PUT", &format!("/v1/images/{name}?kind=rootfs")).body("tar of an image");
    let text = put.send().await.unwrap().text().await.unwrap();
    let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines.last().unwrap()["event"], "imported", "{text}");
    let seen: Value = serde_json::from_str(&front.node.seen.last_uri.lock().unwrap()).unwrap();
    assert_eq!(seen, json!({"name": "docker.io/library/python:3.12", "kind": "rootfs"}));
    let image = json_of(c.call("GET", &format!("/v1/images/{name}")).send().await.unwrap()).await;
    assert_eq!(image["name"], "docker.io/library/python:3.12");
    let text = c.call("PUT", "/v1/images/bad").body("broken").send().await.unwrap().text().await.unwrap();
    assert!(text.contains("\"failed\""), "{text}");
    c.problem(c.call("GET", "/v1/images/bad"), 404, "not_found").await;

    let built = c.call("PUT", "/v1/layers?kind=toolkit&at=/opt").body("in use").send().await.unwrap();
    let digest = json_of(built).await["layer"]["digest"].as_str().unwrap().to_owned();
    let spec = json!({"base": "docker.io/library/python:3.12", "toolkits": [digest], "env": {"A": "1"}});
    let made = c.call("PUT", "/v1/environments/task").json(&spec).send().await.unwrap();
    assert_eq!(json_of(made).await["name"], "task");
    for path in [format!("/v1/images/{name}"), format!("/v1/layers/{digest}")] {
        let message = c.problem(c.call("DELETE", &path), 409, "conflict").await;
        assert!(message.ends_with("is in use by environment \"task\""), "{message}");
    }
    assert_eq!(c.call("DELETE", "/v1/environments/task").send().await.unwrap().status(), 204);
    // A layer that a node still needs stays in the catalogue.
    let refused = c.call("DELETE", &format!("/v1/layers/{digest}"));
    assert!(c.problem(refused, 409, "conflict").await.contains("a sandbox uses"));
    assert!(c.call("GET", "/v1/layers").send().await.unwrap().text().await.unwrap().contains(&digest));
    assert_eq!(c.call("DELETE", &format!("/v1/images/{name}")).send().await.unwrap().status(), 204);
    let removed = front.node.seen.removed.lock().unwrap().clone();
    assert_eq!(removed, [Digest::of(b"tar of an image").to_string()], "the layer goes with its only image");
}

#[tokio::test]
async fn keys_can_be_made_listed_and_deleted() {
    let front = Front::start().await;
    let c = Client::new(&front);
    let made = c.call("POST", "/v1/keys").json(&json!({"name": "ci"})).send().await.unwrap();
    assert_eq!(made.status(), 201);
    let made = json_of(made).await;
    let key = made["key"].as_str().unwrap();
    let with_new = || reqwest::Client::new().get(front.url("/v1/keys")).bearer_auth(key);
    let list = with_new().send().await.unwrap().text().await.unwrap();
    assert!(list.contains("\"ci\"") && !list.contains(key), "{list}");
    let path = format!("/v1/keys/{}", made["id"].as_str().unwrap());
    assert_eq!(c.call("DELETE", &path).send().await.unwrap().status(), 204);
    assert_eq!(with_new().send().await.unwrap().status(), 401, "also though it was cached");
    let nodes = json_of(c.call("GET", "/v1/nodes").send().await.unwrap()).await;
    assert_eq!(nodes["nodes"][0]["max_live"], 10);
}
