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

use crate::catalogue::Page;
use crate::refusal::Refusal;
use crate::state::Gw;
use corral_api::query::PageQuery;
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

/// The page that a query asks for. `is_key` knows the keys of the list, of which its cursors are made.
fn page(query: PageQuery, is_key: impl Fn(&str) -> bool) -> Result<Page, Refusal> {
    let limit = query.limit.unwrap_or(Page::USUAL);
    if !(1..=Page::MOST).contains(&limit) {
        return Err(Refusal::invalid(format!("limit: 1 to {}", Page::MOST)));
    }
    if query.cursor.as_ref().is_some_and(|cursor| !is_key(cursor)) {
        return Err(Refusal::invalid("cursor: give what `next_cursor` of the page before was, or none"));
    }
    Ok(Page { after: query.cursor.unwrap_or_default(), limit })
}
