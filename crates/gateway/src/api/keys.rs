//! API keys.

use crate::extract::{Json, Name, json};
use crate::refusal::Answer;
use crate::state::{Caller, Gw};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use corral_api::catalogue::{KeyList, KeySpec, NewKey};
use utoipa_axum::{router::OpenApiRouter, routes};

pub fn routes() -> OpenApiRouter<Gw> {
    OpenApiRouter::new().routes(routes!(create, list)).routes(routes!(remove))
}

/// Create a key; its text is shown this once.
#[utoipa::path(post, path = "/v1/keys", tag = "keys", request_body = KeySpec,
    responses((status = 201, description = "The key", body = NewKey)))]
async fn create(State(gw): State<Gw>, caller: Caller, Json(spec): Json<KeySpec>) -> Answer {
    let key = gw.catalogue(move |c| c.create_key(&caller.project_id, &spec.name)).await?;
    json(201, &key)
}

/// List keys.
#[utoipa::path(get, path = "/v1/keys", tag = "keys",
    responses((status = 200, description = "By id, without their text", body = KeyList)))]
async fn list(State(gw): State<Gw>, caller: Caller) -> Answer {
    let keys = gw.catalogue(move |c| c.keys(&caller.project_id)).await?;
    json(200, &KeyList { keys })
}

/// Delete a key.
#[utoipa::path(delete, path = "/v1/keys/{key_id}", tag = "keys", responses((status = 204, description = "Deleted")))]
async fn remove(State(gw): State<Gw>, caller: Caller, Name(id): Name) -> Answer {
    gw.catalogue(move |c| c.delete_key(&caller.project_id, &id)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
