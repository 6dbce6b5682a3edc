//! Images: imported on a node, named in the catalogue.

use super::{imports, layers, page};
use crate::catalogue::{Listed, check_name};
use crate::extract::{Checked, Name, Parameters, json};
use crate::octets::Octets;
use crate::refusal::{Answer, Refusal};
use crate::state::{Caller, Gw};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::IntoResponse as _;
use corral_api::catalogue::ImageList;
use corral_api::image::{DiffOnNode, ImageDiff, ImageRecord, ImportProgress};
use corral_api::node::RegistryImport;
use corral_api::query::{DiffQuery, ImageUpload, PageQuery};
use serde::Serialize;
use utoipa_axum::{router::OpenApiRouter, routes};

pub fn routes() -> OpenApiRouter<Gw> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(import))
        .routes(routes!(get, upload, remove))
        .routes(routes!(diff))
        .routes(routes!(export))
}

/// List images.
#[utoipa::path(get, path = "/v1/images", tag = "images", params(PageQuery),
    responses((status = 200, description = "A page, by name", body = ImageList)))]
async fn list(State(gw): State<Gw>, caller: Caller, Parameters(query): Parameters<PageQuery>) -> Answer {
    let page = page(query, |cursor| check_name("image", cursor).is_ok())?;
    let Listed { records: images, next: next_cursor } =
        gw.catalogue(move |c| c.images(&caller.project_id, &page)).await?;
    json(200, &ImageList { images, next_cursor })
}

/// Import an image from a registry.
#[utoipa::path(post, path = "/v1/images:import", tag = "images", request_body = RegistryImport,
    responses((status = 200, description = "Progress; the last line is `imported` or `failed`",
        body = ImportProgress, content_type = "application/x-ndjson")))]
async fn import(State(gw): State<Gw>, caller: Caller, checked: Checked<RegistryImport>) -> Answer {
    let Checked { body, request } = checked;
    let name = body.name.unwrap_or(body.reference);
    check_name("image", &name)?;
    let making = gw.unsettled.begin();
    let response = gw.forward_as(gw.directory.any()?, request, "/rpc/images:import").await?;
    Ok(imports::record(gw.clone(), making, caller.project_id, Some(name), response))
}

/// Import an image from a tar stream: `docker save`, OCI layout or root file system.
#[utoipa::path(put, path = "/v1/images/{name}", tag = "images", params(ImageUpload),
    request_body(content = Octets, content_type = "application/x-tar"),
    responses((status = 200, description = "Progress; the last line is `imported` or `failed`",
        body = ImportProgress, content_type = "application/x-ndjson")))]
async fn upload(
    State(gw): State<Gw>,
    caller: Caller,
    Name(name): Name,
    Parameters(options): Parameters<ImageUpload>,
    mut request: Request,
) -> Answer {
    check_name("image", &name)?;
    let query = serde_urlencoded::to_string([("name", &name)])
        .and_then(|name| Ok(format!("{name}&{}", serde_urlencoded::to_string(&options)?)))
        .map_err(|error| Refusal::internal("writing the import", &error))?;
    *request.uri_mut() =
        format!("/?{query}").parse::<Uri>().map_err(|error| Refusal::internal("writing the import", &error))?;
    let making = gw.unsettled.begin();
    let response = gw.forward_as(gw.directory.any()?, request, "/rpc/images").await?;
    Ok(imports::record(gw.clone(), making, caller.project_id, Some(name), response))
}

/// Get an image by name or digest.
#[utoipa::path(get, path = "/v1/images/{name}", tag = "images",
    responses((status = 200, description = "Its record", body = ImageRecord)))]
async fn get(State(gw): State<Gw>, caller: Caller, Name(name): Name) -> Answer {
    let image = gw.catalogue(move |c| c.image(&caller.project_id, &name)).await?;
    json(200, &image)
}

/// Get an image as an archive: an OCI layout that is a `docker save` archive as well.
#[utoipa::path(get, path = "/v1/images/{name}/archive", tag = "images",
    responses((status = 200, description = "A tar stream", body = Octets, content_type = "application/x-tar")))]
async fn export(State(gw): State<Gw>, caller: Caller, Name(name): Name) -> Answer {
    let project = caller.project_id.clone();
    let image = gw.catalogue(move |c| c.image(&project, &name)).await?;
    ask_any(&gw, caller, "/rpc/images:export", &image).await
}

/// Delete an image, with the layers that nothing else refers to.
#[utoipa::path(delete, path = "/v1/images/{name}", tag = "images",
    responses((status = 204, description = "Deleted")))]
async fn remove(State(gw): State<Gw>, caller: Caller, Name(name): Name) -> Answer {
    let project = caller.project_id.clone();
    let orphans = gw.catalogue(move |c| c.delete_image(&project, &name)).await?;
    layers::delete_orphans(&gw, &caller, orphans).await;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// What differs between two images: paths added, changed and deleted since `from`.
#[utoipa::path(get, path = "/v1/images/{name}/diff", tag = "images", params(DiffQuery),
    responses((status = 200, description = "Paths, sorted", body = ImageDiff)))]
async fn diff(
    State(gw): State<Gw>,
    caller: Caller,
    Name(name): Name,
    Parameters(query): Parameters<DiffQuery>,
) -> Answer {
    const USUAL: u32 = 10_000;
    const MOST: u32 = 100_000;
    let limit = query.limit.unwrap_or(USUAL);
    if !(1..=MOST).contains(&limit) {
        return Err(Refusal::invalid(format!("limit: 1 to {MOST}")));
    }
    let project = caller.project_id.clone();
    let (from, to) = gw
        .catalogue(move |c| {
            let layers = |name: &str| c.image(&project, name).map(|i| i.layers.iter().map(|l| l.digest).collect());
            Ok((layers(&query.from)?, layers(&name)?))
        })
        .await?;
    ask_any(&gw, caller, "/rpc/layers:diff", &DiffOnNode { from, to, limit }).await
}

/// Asks some node, and gives its answer on as it comes.
async fn ask_any(gw: &Gw, caller: Caller, path: &str, question: &impl Serialize) -> Answer {
    let internal = |error: serde_json::Error| Refusal::internal("writing a question for a node", &error);
    let mut request = Request::new(Body::from(serde_json::to_vec(question).map_err(internal)?));
    *request.method_mut() = Method::POST;
    request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    request.extensions_mut().insert(caller);
    gw.forward_as(gw.directory.any()?, request, path).await
}
