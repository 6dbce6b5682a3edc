//! Layers: built on a node, listed in the catalogue.

use super::{imports, page};
use crate::catalogue::Listed;
use crate::directory::DOCUMENT_LIMIT;
use crate::extract::{Json, Name, Parameters, json};
use crate::octets::Octets;
use crate::refusal::{Answer, Refusal};
use crate::state::{Caller, Gw, claim};
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::IntoResponse as _;
use corral_api::catalogue::{GcOnNode, GcResult, GcSpec, LayerList, LayerUsageList};
use corral_api::digest::Digest;
use corral_api::image::ImportProgress;
use corral_api::problem::{ErrorKind, Problem};
use corral_api::query::{LayerUpload, PageQuery};
use utoipa_axum::{router::OpenApiRouter, routes};

pub fn routes() -> OpenApiRouter<Gw> {
    OpenApiRouter::new().routes(routes!(list, build)).routes(routes!(remove)).routes(routes!(usage)).routes(routes!(gc))
}

/// List layers.
#[utoipa::path(get, path = "/v1/layers", tag = "layers", params(PageQuery),
    responses((status = 200, description = "A page, by digest", body = LayerList)))]
async fn list(State(gw): State<Gw>, caller: Caller, Parameters(query): Parameters<PageQuery>) -> Answer {
    let page = page(query, |cursor| cursor.parse::<Digest>().is_ok())?;
    let Listed { records: layers, next: next_cursor } =
        gw.catalogue(move |c| c.layers(&caller.project_id, &page)).await?;
    json(200, &LayerList { layers, next_cursor })
}

/// Build a workspace or toolkit layer from a tar stream.
#[utoipa::path(put, path = "/v1/layers", tag = "layers", params(LayerUpload),
    request_body(content = Octets, content_type = "application/x-tar"),
    responses((status = 200, description = "Progress; the last line is `built` or `failed`",
        body = ImportProgress, content_type = "application/x-ndjson")))]
async fn build(
    State(gw): State<Gw>,
    caller: Caller,
    Parameters(options): Parameters<LayerUpload>,
    request: Request,
) -> Answer {
    if options.kind == corral_api::image::LayerKind::Base {
        return Err(Refusal::invalid("kind: workspace or toolkit; base layers come with images"));
    }
    if !options.at.starts_with('/') {
        return Err(Refusal::invalid("at: an absolute path is needed"));
    }
    if let Some(covered) = covered(&options.at) {
        let text = format!("at: sandboxes have {covered} of their own, so that nothing of the layer would be seen");
        return Err(Refusal::invalid(text));
    }
    let making = gw.unsettled.begin();
    let response = gw.forward_as(gw.directory.any()?, request, "/rpc/layers").await?;
    Ok(imports::record(gw.clone(), making, caller.project_id, None, response))
}

/// What of the platform lies over a path in every sandbox.
fn covered(at: &str) -> Option<&'static str> {
    const TREES: [&str; 3] = ["/proc", "/dev", "/sys"];
    const FILES: [&str; 3] = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
    // The node wants them without doubled slashes and the like.
    let at = std::path::Path::new(at);
    let tree = TREES.into_iter().find(|tree| at.starts_with(tree));
    tree.or_else(|| FILES.into_iter().find(|file| at == std::path::Path::new(file)))
}

/// Delete a layer.
#[utoipa::path(delete, path = "/v1/layers/{digest}", tag = "layers",
    responses((status = 204, description = "Deleted")))]
async fn remove(State(gw): State<Gw>, caller: Caller, Name(text): Name) -> Answer {
    let digest: Digest = text.parse().map_err(|_| {
        let shown: String = text.chars().take(80).collect();
        Refusal::new(ErrorKind::NotFound, format!("there is no layer {shown:?}"))
    })?;
    delete(&gw, &caller, digest).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Deletes a layer from the catalogue, so that nothing new can refer to it, and then from the nodes. Its record comes
/// back when a node still needs it or does not answer.
async fn delete(gw: &Gw, caller: &Caller, digest: Digest) -> Result<(), Refusal> {
    let project = caller.project_id.clone();
    let record = gw.catalogue(move |c| c.delete_layer(&project, &digest)).await?;
    let deleted = delete_on_nodes(gw, caller, digest).await;
    if deleted.is_err() {
        let project = caller.project_id.clone();
        gw.catalogue(move |c| c.put_layer(&project, &record)).await?;
    }
    deleted
}

/// Deletes layers that nothing refers to any more. One that a sandbox still uses stays listed, to be deleted later.
pub async fn delete_orphans(gw: &Gw, caller: &Caller, orphans: Vec<Digest>) {
    for digest in orphans {
        if let Err(refusal) = delete(gw, caller, digest).await {
            tracing::debug!(%digest, kind = %refusal.problem.kind, "a layer that nothing refers to stays");
        }
    }
}

async fn delete_on_nodes(gw: &Gw, caller: &Caller, digest: Digest) -> Result<(), Refusal> {
    for node in gw.directory.nodes() {
        let mut request = Request::new(Body::empty());
        *request.method_mut() = Method::DELETE;
        *request.uri_mut() = format!("/rpc/layers/{digest}")
            .parse()
            .map_err(|error: axum::http::uri::InvalidUri| Refusal::internal("naming the layer", &error))?;
        request.extensions_mut().insert(caller.clone());
        claim(&mut request);
        let response = node.channel.send(request, true).await?;
        if response.status().is_success() || response.status() == StatusCode::NOT_FOUND {
            continue;
        }
        let body = to_bytes(response.into_body(), DOCUMENT_LIMIT).await.unwrap_or_default();
        let problem = serde_json::from_slice::<Problem>(&body)
            .unwrap_or_else(|_| Problem::new(ErrorKind::UpstreamFailed, "the node did not delete the layer"));
        return Err(problem.into());
    }
    Ok(())
}

/// What layers take on a node and in the shared store.
#[utoipa::path(get, path = "/v1/layers:usage", tag = "layers",
    responses((status = 200, description = "By digest", body = LayerUsageList)))]
async fn usage(State(gw): State<Gw>, request: Request) -> Answer {
    gw.forward_as(gw.directory.any()?, request, "/rpc/layers:usage").await
}

/// Remove from the shared store what no image, layer, environment or sandbox needs.
#[utoipa::path(post, path = "/v1/layers:gc", tag = "layers", request_body = GcSpec,
    responses((status = 200, description = "What was removed, or would be", body = GcResult)))]
async fn gc(State(gw): State<Gw>, caller: Caller, Json(spec): Json<GcSpec>) -> Answer {
    // Before the catalogue is read: what ends in between is in both.
    let settled_ms = gw.unsettled.since_ms();
    let needed = gw.catalogue(|c| c.all_layers()).await?;
    let internal = |error: serde_json::Error| Refusal::internal("writing the collection", &error);
    let body = serde_json::to_vec(&GcOnNode { spec, needed, settled_ms }).map_err(internal)?;
    let mut request = Request::new(Body::from(body));
    *request.method_mut() = Method::POST;
    request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    request.extensions_mut().insert(caller);
    gw.forward_as(gw.directory.any()?, request, "/rpc/layers:gc").await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_the_platform_are_known() {
        for at in ["/proc", "/proc/x", "//proc/./x", "/dev/shm", "/sys/fs/", "/etc/hosts", "/etc/resolv.conf/"] {
            assert!(covered(at).is_some_and(|place| at.contains(&place[1..])), "{at}");
        }
        for at in ["/", "/etc", "/etc/hosts.d", "/process", "/opt/proc", "/home/dev"] {
            assert_eq!(covered(at), None, "{at}");
        }
    }
}
