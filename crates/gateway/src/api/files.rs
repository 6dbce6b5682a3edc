//! Files inside sandboxes: checked and forwarded to the sandbox's node. Content is streamed.

use crate::extract::{Checked, Valid};
use crate::octets::Octets;
use crate::refusal::Answer;
use crate::state::Gw;
use axum::extract::{Request, State};
use corral_api::files::{DirectoryPage, FileStatus, MkdirRequest, MoveRequest, WatchEvent};
use corral_api::query::{FileListQuery, FileQuery, FileTreeQuery, FileWrite, TarWrite};
use utoipa_axum::{router::OpenApiRouter, routes};

pub fn routes() -> OpenApiRouter<Gw> {
    OpenApiRouter::new()
        .routes(routes!(read, write, remove))
        .routes(routes!(stat))
        .routes(routes!(list))
        .routes(routes!(mkdir))
        .routes(routes!(rename))
        .routes(routes!(read_tar, write_tar))
        .routes(routes!(watch))
}

/// Read a file, or a part of it.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files", tag = "files",
    params(FileQuery, ("Range" = Option<String>, Header, description = "`bytes=FIRST-LAST`, `bytes=FIRST-` or `bytes=-COUNT`")),
    responses((status = 200, description = "The content", body = Octets, content_type = "application/octet-stream"),
        (status = 206, description = "A part of it", body = Octets, content_type = "application/octet-stream")))]
async fn read(State(gw): State<Gw>, _query: Valid<FileQuery>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Write a file.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/files", tag = "files", params(FileWrite),
    request_body(content = Octets, content_type = "application/octet-stream"),
    responses((status = 200, description = "Written", body = FileStatus)))]
async fn write(State(gw): State<Gw>, _query: Valid<FileWrite>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Remove a file or directory.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/files", tag = "files", params(FileTreeQuery),
    responses((status = 204, description = "Removed")))]
async fn remove(State(gw): State<Gw>, _query: Valid<FileTreeQuery>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Attributes of a file.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/stat", tag = "files", params(FileQuery),
    responses((status = 200, description = "Its attributes", body = FileStatus)))]
async fn stat(State(gw): State<Gw>, _query: Valid<FileQuery>, request: Request) -> Answer {
    gw.forward(request).await
}

/// List a directory.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/list", tag = "files", params(FileListQuery),
    responses((status = 200, description = "Its entries", body = DirectoryPage)))]
async fn list(State(gw): State<Gw>, _query: Valid<FileListQuery>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Make a directory.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/mkdir", tag = "files", request_body = MkdirRequest,
    responses((status = 200, description = "Made", body = FileStatus)))]
async fn mkdir(State(gw): State<Gw>, checked: Checked<MkdirRequest>) -> Answer {
    gw.forward(checked.request).await
}

/// Move a file or directory.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/files/move", tag = "files", request_body = MoveRequest,
    responses((status = 200, description = "Moved", body = FileStatus)))]
async fn rename(State(gw): State<Gw>, checked: Checked<MoveRequest>) -> Answer {
    gw.forward(checked.request).await
}

/// Read a file or directory as a tar stream.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/tar", tag = "files", params(FileQuery),
    responses((status = 200, description = "A tar stream", body = Octets, content_type = "application/x-tar")))]
async fn read_tar(State(gw): State<Gw>, _query: Valid<FileQuery>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Unpack a tar stream in a directory.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/files/tar", tag = "files", params(TarWrite),
    request_body(content = Octets, content_type = "application/x-tar"),
    responses((status = 204, description = "Unpacked")))]
async fn write_tar(State(gw): State<Gw>, _query: Valid<TarWrite>, request: Request) -> Answer {
    gw.forward(request).await
}

/// Watch a directory for changes.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/files/watch", tag = "files", params(FileTreeQuery),
    responses((status = 200, description = "Changes as they come", body = WatchEvent, content_type = "text/event-stream")))]
async fn watch(State(gw): State<Gw>, _query: Valid<FileTreeQuery>, request: Request) -> Answer {
    gw.forward(request).await
}
