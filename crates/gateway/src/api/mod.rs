//! The handlers, a file for each part of the API. What a node answers is checked here and forwarded.

mod builds;
mod commands;
mod environments;
mod files;
mod images;
mod imports;
mod keys;
mod layers;
mod sandboxes;
mod sessions;
mod system;

pub use layers::delete_orphans;

use crate::state::Gw;
use utoipa_axum::router::OpenApiRouter;

/// All routes with their descriptions.
pub fn routes() -> OpenApiRouter<Gw> {
    OpenApiRouter::new()
        .merge(sandboxes::routes())
        .merge(commands::routes())
        .merge(sessions::routes())
        .merge(files::routes())
        .merge(images::routes())
        .merge(builds::routes())
        .merge(layers::routes())
        .merge(environments::routes())
        .merge(keys::routes())
        .merge(system::routes())
}
