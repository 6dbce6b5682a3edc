//! Environments: named in the catalogue.

use super::page;
use crate::catalogue::{Listed, check_name};
use crate::extract::{Json, Name, Parameters, json};
use crate::refusal::Answer;
use crate::state::{Caller, Gw};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use corral_api::catalogue::EnvironmentList;
use corral_api::environment::{EnvironmentRecord, EnvironmentSpec};
use corral_api::query::PageQuery;
use utoipa_axum::{router::OpenApiRouter, routes};

pub fn routes() -> OpenApiRouter<Gw> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(get, put, remove))
}

/// List environments.
#[utoipa::path(get, path = "/v1/environments", tag = "environments", params(PageQuery),
    responses((status = 200, description = "A page, by name", body = EnvironmentList)))]
async fn list(State(gw): State<Gw>, caller: Caller, Parameters(query): Parameters<PageQuery>) -> Answer {
    let page = page(query, |cursor| check_name("environment", cursor).is_ok())?;
    let Listed { records: environments, next: next_cursor } =
        gw.catalogue(move |c| c.environments(&caller.project_id, &page)).await?;
    json(200, &EnvironmentList { environments, next_cursor })
}

/// Get an environment.
#[utoipa::path(get, path = "/v1/environments/{name}", tag = "environments",
    responses((status = 200, description = "Its record", body = EnvironmentRecord)))]
async fn get(State(gw): State<Gw>, caller: Caller, Name(name): Name) -> Answer {
    let record = gw.catalogue(move |c| c.environment(&caller.project_id, &name)).await?;
    json(200, &record)
}

/// Create or replace an environment.
#[utoipa::path(put, path = "/v1/environments/{name}", tag = "environments", request_body = EnvironmentSpec,
    responses((status = 200, description = "Its record", body = EnvironmentRecord)))]
async fn put(State(gw): State<Gw>, caller: Caller, Name(name): Name, Json(spec): Json<EnvironmentSpec>) -> Answer {
    let record = gw.catalogue(move |c| c.put_environment(&caller.project_id, &name, spec)).await?;
    json(200, &record)
}

/// Delete an environment.
#[utoipa::path(delete, path = "/v1/environments/{name}", tag = "environments",
    responses((status = 204, description = "Deleted")))]
async fn remove(State(gw): State<Gw>, caller: Caller, Name(name): Name) -> Answer {
    gw.catalogue(move |c| c.delete_environment(&caller.project_id, &name)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
