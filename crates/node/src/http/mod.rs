//! The node's routes, for the gateway: HTTP over a UNIX socket that only root may open.

mod commands;
mod events;
mod exec_stream;
mod files;
mod images;
mod parts;
mod pty;
mod sandboxes;
mod sessions;
mod status;

use crate::node::Core;
use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{delete, get, post, put};
use std::sync::Arc;

/// Largest JSON body.
const JSON_LIMIT: usize = 8 << 20;

/// All routes.
pub fn router(core: Arc<Core>) -> Router {
    let sandbox = Router::new()
        .route("/", get(sandboxes::get).delete(sandboxes::delete))
        .route("/pause", post(sandboxes::pause))
        .route("/resume", post(sandboxes::resume))
        .route("/ttl", put(sandboxes::set_ttl))
        .route("/stats", get(sandboxes::stats))
        .route("/fork", post(sandboxes::fork))
        .route("/snapshots", post(sandboxes::snapshot))
        .route("/checkpoints", post(sandboxes::checkpoint).get(sandboxes::checkpoints))
        .route("/checkpoints/{number}", delete(sandboxes::drop_checkpoint))
        .route("/rollback", post(sandboxes::rollback))
        .route("/exec", post(commands::exec))
        .route("/commands", get(commands::list))
        .route("/commands/{command_id}", get(commands::get))
        .route("/commands/{command_id}/result", get(commands::result))
        .route("/commands/{command_id}/output", get(commands::output))
        .route("/commands/{command_id}/stdin", post(commands::stdin))
        .route("/commands/{command_id}/signal", post(commands::signal))
        .route("/sessions", post(sessions::open).get(sessions::list))
        .route("/sessions/{session_id}", delete(sessions::close))
        .route("/sessions/{session_id}/run", post(sessions::run))
        .route("/pty", get(pty::open))
        .route("/files", get(files::read).put(files::write).delete(files::remove))
        .route("/files/stat", get(files::stat))
        .route("/files/list", get(files::list))
        .route("/files/mkdir", post(files::mkdir))
        .route("/files/move", post(files::rename))
        .route("/files/tar", get(files::tar_out).put(files::tar_in))
        .route("/files/watch", get(files::watch));
    Router::new()
        .route("/rpc/sandboxes", post(sandboxes::create).get(sandboxes::list))
        .route("/rpc/events", get(events::read))
        .route("/rpc/images", put(images::upload))
        .route("/rpc/images:import", post(images::import))
        .route("/rpc/layers", get(images::layers).put(images::build))
        .route("/rpc/layers/{digest}", delete(images::delete_layer))
        .route("/rpc/layers:usage", get(images::usage))
        .route("/rpc/layers:gc", post(images::gc))
        .route("/rpc/layers:diff", post(images::diff))
        .route("/rpc/images:export", post(images::export))
        .route("/rpc/status", get(status::status))
        .route("/rpc/metrics", get(status::metrics))
        .nest("/v1/sandboxes/{id}", sandbox)
        .layer(DefaultBodyLimit::max(JSON_LIMIT))
        .layer(axum::middleware::from_fn(parts::name_request))
        .fallback(async || {
            parts::Fail::from(corral_api::problem::Problem::new(
                corral_api::problem::ErrorKind::NotFound,
                "the node has no such route",
            ))
        })
        .with_state(core)
}
