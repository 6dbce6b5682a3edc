//! Builds of images.

use crate::build;
use crate::catalogue::check_name;
use crate::extract::Name;
use crate::octets::Octets;
use crate::refusal::{Answer, Refusal};
use crate::state::{Caller, Gw};
use axum::extract::{RawQuery, Request, State};
use corral_api::build::{BuildProgress, BuildQuery};
use utoipa_axum::{router::OpenApiRouter, routes};

pub fn routes() -> OpenApiRouter<Gw> {
    OpenApiRouter::new().routes(routes!(build_image))
}

/// Build an image from a Dockerfile; the body is its context as a tar stream, plain or with gzip or zstd.
#[utoipa::path(put, path = "/v1/images/{name}/build", tag = "images", operation_id = "build",
    params(("dockerfile" = Option<String>, Query, description = "Path in the context; `Dockerfile` where absent"),
        ("target" = Option<String>, Query, description = "Name or number of the stage to build; the last one where absent"),
        ("build_arg" = Option<Vec<String>>, Query, description = "`NAME=VALUE`; may be repeated"),
        ("no_cache" = Option<bool>, Query, description = "Run every step"),
        ("network" = Option<bool>, Query, description = "Give the steps a network: refused so far"),
        ("memory_mib" = Option<u32>, Query, description = "Memory of each sandbox that steps run in"),
        ("cpus" = Option<f64>, Query, description = "Its cores"),
        ("pids" = Option<u32>, Query, description = "Its processes and threads"),
        ("disk_mib" = Option<u32>, Query, description = "What it may write")),
    request_body(content = Octets, content_type = "application/x-tar"),
    responses((status = 200, description = "Progress; the last line is `imported` or `failed`",
        body = BuildProgress, content_type = "application/x-ndjson")))]
async fn build_image(
    State(gw): State<Gw>,
    caller: Caller,
    Name(name): Name,
    RawQuery(query): RawQuery,
    request: Request,
) -> Answer {
    check_name("image", &name)?;
    let pairs: Vec<(String, String)> = serde_urlencoded::from_str(query.as_deref().unwrap_or_default())
        .map_err(|error| Refusal::invalid(format!("query: {error}")))?;
    let query = BuildQuery::of_pairs(pairs).map_err(|text| Refusal::invalid(format!("query: {text}")))?;
    build::start(gw, caller, name, query, request.into_body()).await
}
