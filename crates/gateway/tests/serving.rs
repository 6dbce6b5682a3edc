//! The gateway as a server: draining and TLS.
#![allow(clippy::unwrap_used, reason = "a test")]

mod support;

use corral_gateway::{Catalogue, Gateway, GatewayConfig, ServeError, TlsFiles};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::Front;

#[tokio::test]
async fn draining_finishes_requests_in_flight_and_ends_event_streams() {
    let config = GatewayConfig { drain_notice: Duration::from_millis(300), ..GatewayConfig::default() };
    let front = Front::with(config).await;
    let http = reqwest::Client::new();
    let request = tokio::spawn(http.get(front.sandbox("/stats")).bearer_auth(&front.key).send());
    front.node.seen.begun.notified().await;
    let events = http.get(front.url("/v1/events")).bearer_auth(&front.key).send().await.unwrap();
    front.shutdown.notify_one();
    while http.get(front.url("/readyz")).send().await.unwrap().status() != 503 {}
    assert!(events.text().await.unwrap().starts_with("id: 1"), "the stream ends well");
    while tokio::net::TcpStream::connect(front.address).await.is_ok() {}
    front.node.seen.gate.add_permits(1);
    assert_eq!(request.await.unwrap().unwrap().status(), 200);
    front.serving.await.unwrap().unwrap();
}

#[tokio::test]
async fn draining_is_limited() {
    let front =
        Front::with(GatewayConfig { drain_limit: Duration::from_millis(100), ..GatewayConfig::default() }).await;
    let request = reqwest::Client::new().get(front.sandbox("/stats")).bearer_auth(&front.key);
    let request = tokio::spawn(request.send());
    front.node.seen.begun.notified().await;
    let started = Instant::now();
    front.shutdown.notify_one();
    front.serving.await.unwrap().unwrap();
    assert!(started.elapsed() < Duration::from_secs(5));
    assert!(request.await.unwrap().is_err());
}

fn gateway() -> Gateway {
    Gateway::new(GatewayConfig::default(), Arc::new(Catalogue::in_memory().unwrap()), [])
}

#[tokio::test]
async fn plain_http_beyond_loopback_is_refused() {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let refused = gateway().serve(listener, None, std::future::pending()).await.unwrap_err();
    assert!(matches!(refused, ServeError::InsecureListen(_)), "{refused}");
}

#[tokio::test]
async fn tls_serves_and_bad_certificates_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let files = TlsFiles { cert: dir.path().join("cert.pem"), key: dir.path().join("key.pem") };
    let bind = || TcpListener::bind("127.0.0.1:0").unwrap();
    let error = gateway().serve(bind(), Some(files.clone()), std::future::pending()).await.unwrap_err();
    assert!(error.to_string().contains("cert.pem"), "{error}");
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    std::fs::write(&files.cert, made.cert.pem()).unwrap();
    std::fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
    let listener = bind();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(gateway().serve(listener, Some(files), std::future::pending()));
    let root = reqwest::Certificate::from_pem(made.cert.pem().as_bytes()).unwrap();
    let http = reqwest::Client::builder().tls_certs_only([root]).build().unwrap();
    let url = format!("https://localhost:{port}/healthz");
    let response = http.get(&url).send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.version()), (200, reqwest::Version::HTTP_2));
    assert!(reqwest::Client::new().get(&url).send().await.is_err(), "an unknown issuer is refused");
}
