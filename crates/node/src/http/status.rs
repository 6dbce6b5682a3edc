//! How the node is.

use super::parts::{Answer, json};
use crate::node::Core;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use corral_api::node::NodeStatus;
use std::sync::Arc;
use std::sync::atomic::Ordering;

fn now(core: &Core) -> NodeStatus {
    let memory = crate::upkeep::memory();
    let space = core.containers.writable().space();
    NodeStatus {
        id: core.id.clone(),
        accepting: core.is_accepting(),
        live: core.live_count(),
        max_live: core.config.max_live,
        queued: core.queued.load(Ordering::Relaxed) as u64,
        cpus: core.cores.into(),
        memory_bytes: memory.total_bytes,
        memory_available_bytes: memory.available_bytes,
        disk_bytes: space.total_bytes,
        disk_available_bytes: space.free_bytes,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

pub async fn status(State(core): State<Arc<Core>>) -> Answer {
    json(StatusCode::OK, &now(&core))
}

pub async fn metrics(State(core): State<Arc<Core>>) -> Answer {
    let status = now(&core);
    let keepers = core.keepers.all().iter().filter(|k| k.link().is_some() && !k.is_stuck()).count();
    let lazy = core.lazy_metrics().await;
    let gauges = [
        ("corral_node_sandboxes_live", "Sandboxes that are not ended", status.live as f64),
        ("corral_node_sandboxes_max", "Most sandboxes admitted", status.max_live as f64),
        ("corral_node_creates_queued", "Creates waiting or starting", status.queued as f64),
        ("corral_node_memory_available_bytes", "Memory available on the host", status.memory_available_bytes as f64),
        ("corral_node_writable_free_bytes", "Free space for writable layers", status.disk_available_bytes as f64),
        ("corral_node_keepers_connected", "Keepers that answer", keepers as f64),
    ];
    let text = core.metrics.text(&gauges, &lazy);
    Ok(([("content-type", "application/openmetrics-text; version=1.0.0; charset=utf-8")], text).into_response())
}
