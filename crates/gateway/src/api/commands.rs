//! Commands and terminals: checked and forwarded to the sandbox's node.

use crate::extract::{Checked, Valid};
use crate::octets::Octets;
use crate::refusal::{Answer, Refusal};
use crate::state::Gw;
use axum::extract::{Request, State};
use corral_api::catalogue::CommandList;
use corral_api::command::{CommandStatus, ExecEvent, ExecResult, ExecSpec, SignalRequest};
use corral_api::query::{ExecQuery, OutputQuery, StdinQuery, WaitQuery};
use utoipa_axum::{router::OpenApiRouter, routes};

pub fn routes() -> OpenApiRouter<Gw> {
    OpenApiRouter::new()
        .routes(routes!(exec))
        .routes(routes!(list))
        .routes(routes!(get))
        .routes(routes!(result))
        .routes(routes!(output))
        .routes(routes!(stdin))
        .routes(routes!(signal))
        .routes(routes!(pty))
}

/// Run a command.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec", tag = "commands", request_body = ExecSpec, params(ExecQuery),
    responses((status = 200, description = "It ended; with `stream=true` NDJSON events",
            content((ExecResult = "application/json"), (ExecEvent = "application/x-ndjson"))),
        (status = 202, description = "It runs in the background", body = CommandStatus)))]
async fn exec(State(gw): State<Gw>, _query: Valid<ExecQuery>, checked: Checked<ExecSpec>) -> Answer {
    let Checked { body, request } = checked;
    if body.argv.is_empty() == body.shell.is_none() {
        return Err(Refusal::invalid("give either argv or shell"));
    }
    gw.forward_repeatable(request, body.step_key.is_some()).await
}

/// List the commands of a sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/commands", tag = "commands",
    responses((status = 200, description = "Oldest first", body = CommandList)))]
async fn list(State(gw): State<Gw>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Get a command, or wait for its end.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/commands/{command_id}", tag = "commands", params(WaitQuery),
    responses((status = 200, description = "As it is now", body = CommandStatus)))]
async fn get(State(gw): State<Gw>, _query: Valid<WaitQuery>, request: Request) -> Answer {
    gw.forward(request).await
}

/// The result of an ended command.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/commands/{command_id}/result", tag = "commands",
    responses((status = 200, description = "Its result", body = ExecResult)))]
async fn result(State(gw): State<Gw>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Read a command's output from any offset, or follow it.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/commands/{command_id}/output", tag = "commands", params(OutputQuery),
    responses((status = 200, description = "Octets of the stream", body = Octets, content_type = "application/octet-stream",
        headers(("corral-offset" = u64, description = "Offset of the first octet here"),
            ("corral-total" = u64, description = "Octets the command wrote so far"),
            ("corral-truncated" = bool, description = "Whether octets between head and tail were dropped"),
            ("corral-dropped-to" = u64, description = "First kept offset after the gap")))))]
async fn output(State(gw): State<Gw>, _query: Valid<OutputQuery>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Write to a command's standard input.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/commands/{command_id}/stdin", tag = "commands", params(StdinQuery),
    request_body(content = Octets, content_type = "application/octet-stream"),
    responses((status = 204, description = "Written")))]
async fn stdin(State(gw): State<Gw>, _query: Valid<StdinQuery>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Send a signal to a command.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/commands/{command_id}/signal", tag = "commands",
    request_body = SignalRequest, responses((status = 204, description = "Sent")))]
async fn signal(State(gw): State<Gw>, checked: Checked<SignalRequest>) -> Answer {
    gw.forward(checked.request).await
}

/// A terminal over WebSocket: binary frames are its bytes, text frames are `PtyMessage`s.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/pty", tag = "commands",
    params(("argv" = Option<Vec<String>>, Query, description = "Program and arguments, each its own parameter; a shell where absent"),
        ("cwd" = Option<String>, Query, description = "Working directory"),
        ("user" = Option<String>, Query, description = "Run as this user"),
        ("cols" = Option<u16>, Query, description = "Columns"),
        ("rows" = Option<u16>, Query, description = "Rows"),
        ("command_id" = Option<String>, Query, description = "Come back to this terminal"),
        ("offset" = Option<u64>, Query, description = "From this octet of its output")),
    responses((status = 101, description = "The WebSocket is open")))]
async fn pty(State(gw): State<Gw>, request: Request) -> Answer {
    gw.forward_upgrade(request).await
}
