//! Nodes, health, version, metrics and the description of the API.

use crate::extract::json;
use crate::refusal::{Answer, Refusal};
use crate::state::{Gw, Shared};
use axum::body::to_bytes;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse as _;
use corral_api::catalogue::{NodeList, VersionInfo};
use corral_api::problem::ErrorKind;
use futures_util::future::join_all;
use std::sync::atomic::Ordering;
use std::time::Duration;
use utoipa_axum::{router::OpenApiRouter, routes};

const METRICS_LIMIT: Duration = Duration::from_secs(2);
const METRICS_BYTES: usize = 16 << 20;

pub fn routes() -> OpenApiRouter<Gw> {
    OpenApiRouter::new()
        .routes(routes!(nodes))
        .routes(routes!(healthz))
        .routes(routes!(readyz))
        .routes(routes!(version))
        .routes(routes!(metrics))
        .routes(routes!(openapi_json))
}

/// List nodes.
#[utoipa::path(get, path = "/v1/nodes", tag = "system",
    responses((status = 200, description = "By id", body = NodeList)))]
async fn nodes(State(gw): State<Gw>) -> Answer {
    join_all(gw.directory.nodes().map(|node| node.refresh())).await;
    json(200, &NodeList { nodes: gw.directory.nodes().filter_map(|node| node.last_status()).collect() })
}

/// Whether the process is up.
#[utoipa::path(get, path = "/healthz", tag = "system",
    responses((status = 200, description = "It is", body = String, content_type = "text/plain")))]
async fn healthz() -> &'static str {
    "ok\n"
}

/// Whether requests can be served: a node answers, and the gateway does not shut down.
#[utoipa::path(get, path = "/readyz", tag = "system",
    responses((status = 200, description = "They can", body = String, content_type = "text/plain")))]
async fn readyz(State(gw): State<Gw>) -> Answer {
    let unavailable = |text: &str| Refusal::new(ErrorKind::Unavailable, text).retry_after_ms(1000);
    if gw.draining.load(Ordering::Relaxed) {
        return Err(unavailable("the gateway is shutting down"));
    }
    let answers = join_all(gw.directory.nodes().map(|node| node.refresh())).await;
    if answers.iter().any(Option::is_some) { Ok("ok\n".into_response()) } else { Err(unavailable("no node answers")) }
}

/// Version of Corral and its API.
#[utoipa::path(get, path = "/version", tag = "system",
    responses((status = 200, description = "The versions", body = VersionInfo)))]
async fn version() -> Answer {
    json(200, &VersionInfo { version: env!("CARGO_PKG_VERSION").into(), api: "v1".into() })
}

/// Counters of the gateway and its nodes in the Prometheus text format.
#[utoipa::path(get, path = "/metrics", tag = "system",
    responses((status = 200, description = "Metrics", body = String, content_type = "text/plain")))]
async fn metrics(State(gw): State<Gw>) -> Answer {
    let mut text = gw.metrics.text()?;
    text.push_str(&node_metrics(&gw).await);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}

async fn node_metrics(gw: &Shared) -> String {
    let read = gw.directory.nodes().map(|node| async move {
        let read = async {
            let response = node.channel.get("/rpc/metrics").await.ok().filter(|r| r.status() == 200)?;
            let body = to_bytes(response.into_body(), METRICS_BYTES).await.ok()?;
            String::from_utf8(body.into()).ok()
        };
        let text = tokio::time::timeout(METRICS_LIMIT, read).await.ok().flatten();
        let mut text = text.unwrap_or_else(|| format!("# node {} does not answer\n", node.channel.id()));
        if !text.ends_with('\n') {
            text.push('\n');
        }
        text
    });
    join_all(read).await.concat()
}

/// This description.
#[utoipa::path(get, path = "/openapi.json", tag = "system",
    responses((status = 200, description = "OpenAPI 3.1", content_type = "application/json")))]
async fn openapi_json(State(gw): State<Gw>) -> Answer {
    Ok(([(header::CONTENT_TYPE, "application/json")], (gw.description)()).into_response())
}
