//! Sandboxes of builds whose gateway died: they are removed when it starts anew.

use super::bench::ENVIRONMENT_PREFIX;
use crate::directory::{DOCUMENT_LIMIT, Node};
use crate::state::Gw;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::Method;
use corral_api::build::BUILD_LABEL;
use corral_api::ids::SandboxId;
use corral_api::sandbox::SandboxPage;

/// Removes what an earlier process left. No build has begun yet.
pub async fn sweep(gw: Gw) {
    for node in gw.directory.nodes() {
        let mut cursor = None;
        while let Some(page) = page(node, cursor.take()).await {
            for sandbox in &page.sandboxes {
                if sandbox.labels.contains_key(BUILD_LABEL) && sandbox.environment.starts_with(ENVIRONMENT_PREFIX) {
                    tracing::info!(sandbox_id = %sandbox.id, "removing the sandbox of a build that was cut off");
                    remove(node, &sandbox.id).await;
                }
            }
            cursor = page.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
    }
}

async fn page(node: &Node, cursor: Option<String>) -> Option<SandboxPage> {
    let from = cursor.map(|cursor| format!("&cursor={cursor}")).unwrap_or_default();
    let request = Request::get(format!("/rpc/sandboxes?limit=1000{from}")).body(Body::empty()).ok()?;
    let response = node.channel.send(request, true).await.ok().filter(|r| r.status().is_success())?;
    let body = to_bytes(response.into_body(), DOCUMENT_LIMIT * 8).await.ok()?;
    serde_json::from_slice(&body).ok()
}

async fn remove(node: &Node, id: &SandboxId) {
    let Ok(mut request) = Request::get(format!("/v1/sandboxes/{id}")).body(Body::empty()) else { return };
    *request.method_mut() = Method::DELETE;
    if let Err(error) = node.channel.send(request, true).await {
        tracing::warn!(sandbox_id = %id, error = crate::refusal::chain(&error), "it stays for now");
    }
}
