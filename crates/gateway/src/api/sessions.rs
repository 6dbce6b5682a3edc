//! Shell sessions: checked and forwarded to the sandbox's node.

use crate::extract::Checked;
use crate::refusal::Answer;
use crate::state::Gw;
use axum::extract::{Request, State};
use corral_api::catalogue::SessionList;
use corral_api::command::{ExecResult, SessionRun, SessionSpec, SessionStatus};
use utoipa_axum::{router::OpenApiRouter, routes};

pub fn routes() -> OpenApiRouter<Gw> {
    OpenApiRouter::new().routes(routes!(open, list)).routes(routes!(close)).routes(routes!(run))
}

/// Open a shell that keeps its state between commands.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/sessions", tag = "sessions", request_body = SessionSpec,
    responses((status = 201, description = "Open", body = SessionStatus)))]
async fn open(State(gw): State<Gw>, checked: Checked<SessionSpec>) -> Answer {
    gw.forward(checked.request).await
}

/// List the sessions of a sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/sessions", tag = "sessions",
    responses((status = 200, description = "The sessions", body = SessionList)))]
async fn list(State(gw): State<Gw>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Close a session and end its shell.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/sessions/{session_id}", tag = "sessions",
    responses((status = 200, description = "Closed", body = SessionStatus)))]
async fn close(State(gw): State<Gw>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Run shell text in a session.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/sessions/{session_id}/run", tag = "sessions",
    request_body = SessionRun, responses((status = 200, description = "It ended", body = ExecResult)))]
async fn run(State(gw): State<Gw>, checked: Checked<SessionRun>) -> Answer {
    let repeatable = checked.body.step_key.is_some();
    gw.forward_repeatable(checked.request, repeatable).await
}
