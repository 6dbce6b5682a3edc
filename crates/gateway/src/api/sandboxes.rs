//! Sandboxes: create (one or many), list, and what their node answers of their life.

use crate::directory::DOCUMENT_LIMIT;
use crate::edge::REQUEST_ID;
use crate::extract::{Checked, Json, Valid, json};
use crate::refusal::{Answer, Refusal};
use crate::state::{Caller, Gw, Shared, claim};
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, Response, Uri, header};
use corral_api::catalogue::{BatchItem, BatchResult, BatchSpec};
use corral_api::digest::Digest;
use corral_api::image::{ImageRecord, SnapshotSpec};
use corral_api::problem::{ErrorKind, Problem};
use corral_api::query::EventQuery;
use corral_api::sandbox::{
    Checkpoint, CheckpointList, CreateOnNode, EventPage, ForkSpec, RollbackSpec, SandboxPage, SandboxSpec,
    SandboxStats, SandboxStatus, State as SandboxState, TtlUpdate,
};
use futures_util::StreamExt as _;
use utoipa_axum::{router::OpenApiRouter, routes};

/// The most sandboxes of one batch.
const MAX_BATCH: usize = 1000;

pub fn routes() -> OpenApiRouter<Gw> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(create_batch))
        .routes(routes!(events))
        .routes(routes!(get, remove))
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(set_ttl))
        .routes(routes!(stats))
        .routes(routes!(fork))
        .routes(routes!(snapshot))
        .routes(routes!(checkpoint, checkpoints))
        .routes(routes!(drop_checkpoint))
        .routes(routes!(rollback))
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Refusal> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    match value.to_str() {
        Ok(text) if (1..=255).contains(&text.len()) => Ok(Some(text.to_owned())),
        _ => Err(Refusal::invalid("Idempotency-Key: 1–255 printable ASCII characters")),
    }
}

/// Resolves the environment and sends the create to the chosen node.
async fn place(
    gw: &Shared,
    caller: &Caller,
    headers: &HeaderMap,
    key: Option<String>,
    spec: SandboxSpec,
) -> Result<Response<Body>, Refusal> {
    let environment = match gw.catalogue.resolved(&caller.project_id, &spec)? {
        Some(environment) => environment,
        None => {
            let (project, spec) = (caller.project_id.clone(), spec.clone());
            gw.catalogue(move |catalogue| catalogue.resolve(&project, &spec)).await?
        }
    };
    let internal = |error: serde_json::Error| Refusal::internal("writing the create", &error);
    let repeatable = key.is_some();
    let create = CreateOnNode {
        project_id: caller.project_id.to_string(),
        idempotency_key: key,
        body_digest: Digest::of(&serde_json::to_vec(&spec).map_err(internal)?),
        environment,
        spec,
    };
    let mut request = Request::new(Body::from(serde_json::to_vec(&create).map_err(internal)?));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = Uri::from_static("/rpc/sandboxes");
    request.headers_mut().insert(header::CONTENT_TYPE, axum::http::HeaderValue::from_static("application/json"));
    if let Some(id) = headers.get(REQUEST_ID) {
        request.headers_mut().insert(REQUEST_ID, id.clone());
    }
    request.extensions_mut().insert(caller.clone());
    claim(&mut request);
    let placing = gw.directory.place()?;
    Ok(placing.node().channel.send(request, repeatable).await?)
}

/// Create a sandbox and wait until it runs.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes", request_body = SandboxSpec,
    params(("Idempotency-Key" = Option<String>, Header, description = "The same key and body again return the same sandbox")),
    responses((status = 201, description = "It runs", body = SandboxStatus),
        (status = 200, description = "The key repeats: the sandbox it made", body = SandboxStatus)))]
async fn create(State(gw): State<Gw>, caller: Caller, headers: HeaderMap, Json(spec): Json<SandboxSpec>) -> Answer {
    let key = idempotency_key(&headers)?;
    place(&gw, &caller, &headers, key, spec).await
}

/// Create many sandboxes at once, with a result for each.
#[utoipa::path(post, path = "/v1/sandboxes:batch", tag = "sandboxes", request_body = BatchSpec,
    params(("Idempotency-Key" = Option<String>, Header, description = "Item N uses `KEY#N`")),
    responses((status = 200, description = "A result for each item, in their order", body = BatchResult)))]
async fn create_batch(
    State(gw): State<Gw>,
    caller: Caller,
    headers: HeaderMap,
    Json(batch): Json<BatchSpec>,
) -> Answer {
    if !(1..=MAX_BATCH).contains(&batch.items.len()) {
        return Err(Refusal::invalid(format!("items: {} given, 1–{MAX_BATCH} are allowed", batch.items.len())));
    }
    let key = idempotency_key(&headers)?;
    let (gw, caller, headers, key) = (&gw, &caller, &headers, &key);
    let mut results: Vec<(usize, BatchItem)> = futures_util::stream::iter(batch.items.into_iter().enumerate())
        .map(|(index, spec)| async move {
            let key = key.as_ref().map(|key| format!("{key}#{index}"));
            (index, create_item(gw, caller, headers, key, spec).await)
        })
        .buffer_unordered(gw.config.batch_concurrency.max(1))
        .collect()
        .await;
    results.sort_unstable_by_key(|(index, _)| *index);
    json(200, &BatchResult { items: results.into_iter().map(|(_, item)| item).collect() })
}

async fn create_item(
    gw: &Shared,
    caller: &Caller,
    headers: &HeaderMap,
    key: Option<String>,
    spec: SandboxSpec,
) -> BatchItem {
    let made = async {
        let response = place(gw, caller, headers, key, spec).await?;
        let created = response.status().is_success();
        let nonsense = || Refusal::new(ErrorKind::UpstreamFailed, "the node's answer cannot be read");
        let body = to_bytes(response.into_body(), DOCUMENT_LIMIT).await.map_err(|_| nonsense())?;
        if created {
            return serde_json::from_slice::<SandboxStatus>(&body).map_err(|_| nonsense());
        }
        let problem = serde_json::from_slice::<Problem>(&body).map_err(|_| nonsense())?;
        Err(problem.into())
    };
    match made.await {
        Ok(sandbox) => BatchItem::Sandbox(Box::new(sandbox)),
        Err(mut refusal) => {
            let id = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
            refusal.problem.request_id = id.map(str::to_owned);
            if let Some(detail) = &refusal.detail {
                tracing::warn!(request_id = id, kind = %refusal.problem.kind, detail, "an item of a batch failed");
            }
            BatchItem::Problem(refusal.problem)
        }
    }
}

/// List sandboxes.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes",
    params(("state" = Option<SandboxState>, Query, description = "In this state only"),
        ("label" = Option<Vec<String>>, Query, description = "`key=value`; may be repeated, all must match"),
        ("environment" = Option<String>, Query, description = "Of this environment only"),
        ("limit" = Option<u32>, Query, description = "The most in one page"),
        ("cursor" = Option<String>, Query, description = "`next_cursor` of the page before")),
    responses((status = 200, description = "A page", body = SandboxPage)))]
async fn list(State(gw): State<Gw>, request: Request) -> Answer {
    let node = gw.directory.any()?;
    gw.forward_as(node, request, "/rpc/sandboxes").await
}

/// Read events, or follow them with `Accept: text/event-stream`.
#[utoipa::path(get, path = "/v1/events", tag = "sandboxes",
    params(EventQuery, ("Last-Event-ID" = Option<u64>, Header, description = "Where a broken stream goes on")),
    responses((status = 200, description = "A page, or a stream of events", content((EventPage = "application/json"), (String = "text/event-stream")))))]
async fn events(State(gw): State<Gw>, _query: Valid<EventQuery>, request: Request) -> Answer {
    let node = gw.directory.any()?;
    gw.forward_as(node, request, "/rpc/events").await
}

/// Get a sandbox; an ended one stays readable for a day.
#[utoipa::path(get, path = "/v1/sandboxes/{id}", tag = "sandboxes",
    responses((status = 200, description = "As it is now", body = SandboxStatus)))]
async fn get(State(gw): State<Gw>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Stop a sandbox and remove what it wrote.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}", tag = "sandboxes",
    responses((status = 200, description = "As it ended", body = SandboxStatus)))]
async fn remove(State(gw): State<Gw>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Freeze a sandbox.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/pause", tag = "sandboxes",
    responses((status = 200, description = "Paused", body = SandboxStatus)))]
async fn pause(State(gw): State<Gw>, request: Request) -> Answer {
    gw.forward_repeatable(request, true).await
}

/// Let a frozen sandbox go on.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/resume", tag = "sandboxes",
    responses((status = 200, description = "Running", body = SandboxStatus)))]
async fn resume(State(gw): State<Gw>, request: Request) -> Answer {
    gw.forward_repeatable(request, true).await
}

/// Change how long a sandbox lives.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/ttl", tag = "sandboxes", request_body = TtlUpdate,
    responses((status = 200, description = "Changed", body = SandboxStatus)))]
async fn set_ttl(State(gw): State<Gw>, checked: Checked<TtlUpdate>) -> Answer {
    gw.forward(checked.request).await
}

/// Resources a sandbox uses now.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/stats", tag = "sandboxes",
    responses((status = 200, description = "Now", body = SandboxStats)))]
async fn stats(State(gw): State<Gw>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Make new sandboxes whose disks begin as this one's is now; processes are not copied.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fork", tag = "sandboxes", request_body = ForkSpec,
    responses((status = 200, description = "A result for each, in order", body = BatchResult)))]
async fn fork(State(gw): State<Gw>, checked: Checked<ForkSpec>) -> Answer {
    checked.body.check().map_err(Refusal::invalid)?;
    let repeatable = checked.body.idempotency_key.is_some();
    gw.forward_repeatable(checked.request, repeatable).await
}

/// Pack what a sandbox wrote into a layer, and make an image of it with the layers it stands on.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/snapshots", tag = "sandboxes", request_body = SnapshotSpec,
    responses((status = 201, description = "The image", body = ImageRecord)))]
async fn snapshot(State(gw): State<Gw>, caller: Caller, checked: Checked<SnapshotSpec>) -> Answer {
    crate::catalogue::check_name("image", &checked.body.name)?;
    let _making = gw.unsettled.begin();
    let response = gw.forward_repeatable(checked.request, false).await?;
    if !response.status().is_success() {
        return Ok(response);
    }
    let failed = |text: &str| Refusal::new(ErrorKind::UpstreamFailed, text);
    let body = to_bytes(response.into_body(), DOCUMENT_LIMIT).await;
    let body = body.map_err(|_| failed("the node broke off its answer to the snapshot"))?;
    let mut image: ImageRecord =
        serde_json::from_slice(&body).map_err(|_| failed("the node's answer to the snapshot cannot be read"))?;
    let project = caller.project_id;
    let image = gw
        .catalogue(move |c| {
            if let Some(origin) = &mut image.snapshot {
                // What the sandbox was made from counts only where it is a snapshot itself.
                let is_snapshot = |name: &String| c.image(&project, name).is_ok_and(|i| i.snapshot.is_some());
                origin.parent = origin.parent.take().filter(is_snapshot);
            }
            c.put_image(&project, &image)?;
            Ok(image)
        })
        .await?;
    json(201, &image)
}

/// Keep the disk of a sandbox as it is now, on its node.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/checkpoints", tag = "sandboxes",
    responses((status = 201, description = "Kept", body = Checkpoint)))]
async fn checkpoint(State(gw): State<Gw>, request: Request) -> Answer {
    gw.forward(request).await
}

/// List the checkpoints of a sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/checkpoints", tag = "sandboxes",
    responses((status = 200, description = "Oldest first", body = CheckpointList)))]
async fn checkpoints(State(gw): State<Gw>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Remove a checkpoint.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/checkpoints/{number}", tag = "sandboxes",
    responses((status = 204, description = "Removed")))]
async fn drop_checkpoint(State(gw): State<Gw>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Put the disk of a sandbox back to a checkpoint: all its processes end, and it starts again.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/rollback", tag = "sandboxes", request_body = RollbackSpec,
    responses((status = 200, description = "It runs again", body = SandboxStatus)))]
async fn rollback(State(gw): State<Gw>, checked: Checked<RollbackSpec>) -> Answer {
    gw.forward(checked.request).await
}
