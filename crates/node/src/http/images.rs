//! Imports and layers. An upload is spooled to the data directory first: archives are read more than once.

use super::commands::no_content;
use super::parts::{Answer, Body, Fail, Params, invalid, json, ndjson};
use crate::error::{import_problem, store_problem};
use crate::node::Core;
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use corral_api::catalogue::{GcOnNode, LayerList};
use corral_api::digest::Digest;
use corral_api::image::{DiffOnNode, ImageRecord, ImportProgress, LayerKind};
use corral_api::node::RegistryImport;
use corral_api::problem::{ErrorKind, Problem};
use corral_api::query::UploadKind;
use corral_layers::{
    BuildOptions, CancelFlag, ImageSource, ImportError, ImportOptions, LayerSource, LayerStore, RegistryAuth,
};
use futures_util::StreamExt;
use serde::Deserialize;
use std::sync::Arc;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;
use tokio_util::io::{ReaderStream, SyncIoBridge};

type Node = State<Arc<Core>>;

/// Lines of progress waiting for a slow reader; more are dropped, the last line never.
const QUEUE: usize = 256;
/// What callers know the spooled file as.
const UPLOAD: &str = "the upload";

#[derive(Debug, Deserialize)]
pub struct UploadQuery {
    name: String,
    #[serde(default)]
    kind: UploadKind,
    platform: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct BuildQuery {
    kind: LayerKind,
    at: String,
}

pub async fn import(State(core): Node, Body(request): Body<RegistryImport>) -> Answer {
    let mut options = ImportOptions::named(request.name.unwrap_or_else(|| request.reference.clone()));
    if let Some(platform) = request.platform {
        options.platform = platform;
    }
    let auth = match (request.username, request.password) {
        (Some(username), Some(password)) => RegistryAuth::Basic { username, password },
        (None, None) => RegistryAuth::Anonymous,
        _ => return Err(invalid("username and password: give both or neither")),
    };
    let source = ImageSource::Registry { reference: request.reference, auth, plain_http: request.plain_http };
    Ok(run(&core, None, move |store, cancel, progress| {
        store.import_image(&source, &options, cancel, progress).map(|_| ())
    }))
}

pub async fn upload(State(core): Node, Params(query): Params<UploadQuery>, request: Request) -> Answer {
    let spooled = spool(&core, request).await?;
    let mut options = ImportOptions::named(query.name);
    options.source_name = Some(UPLOAD.to_owned());
    if let Some(platform) = query.platform {
        options.platform = platform;
    }
    let path = spooled.path().to_owned();
    let kind = query.kind;
    Ok(run(&core, Some(spooled), move |store, cancel, progress| {
        let import = |source| store.import_image(&source, &options, cancel, progress).map(|_| ());
        match kind {
            UploadKind::Archive => import(ImageSource::Archive(path)),
            UploadKind::Rootfs => import(ImageSource::RootfsTar(path)),
            UploadKind::Auto => match import(ImageSource::Archive(path.clone())) {
                Err(ImportError::UnknownFormat { .. }) => import(ImageSource::RootfsTar(path)),
                other => other,
            },
        }
    }))
}

pub async fn build(State(core): Node, Params(query): Params<BuildQuery>, request: Request) -> Answer {
    let spooled = spool(&core, request).await?;
    let mut options = BuildOptions::new(query.kind, query.at);
    options.source_name = Some(UPLOAD.to_owned());
    let source = LayerSource::Tar(spooled.path().to_owned());
    Ok(run(&core, Some(spooled), move |store, cancel, progress| {
        store.build_layer(&source, &options, cancel, progress).map(|_| ())
    }))
}

/// Writes a body to a file of the data directory.
async fn spool(core: &Core, request: Request) -> Result<tempfile::NamedTempFile, Fail> {
    let failed = |e: &std::io::Error| {
        tracing::error!(error = %e, "an upload cannot be spooled");
        let (kind, text) = match e.raw_os_error() {
            Some(libc::ENOSPC) => (ErrorKind::InsufficientStorage, "the node's disk is too full for the upload"),
            Some(libc::EDQUOT) => (ErrorKind::InsufficientStorage, "the node's own disk quota is used up"),
            _ => (ErrorKind::StorageError, "the node cannot store the upload"),
        };
        Fail::from(Problem::new(kind, text))
    };
    let spooled = tempfile::NamedTempFile::new_in(core.config.data_dir.join("spool")).map_err(|e| failed(&e))?;
    let file = spooled.reopen().map_err(|e| failed(&e))?;
    let mut file = tokio::io::BufWriter::with_capacity(1 << 20, tokio::fs::File::from_std(file));
    let mut body = request.into_body().into_data_stream();
    while let Some(piece) = body.next().await {
        let piece = piece.map_err(|_| invalid("the upload broke off"))?;
        file.write_all(&piece).await.map_err(|e| failed(&e))?;
    }
    file.flush().await.map_err(|e| failed(&e))?;
    Ok(spooled)
}

/// Cancels the work when its reader is gone.
struct CancelOnDrop(CancelFlag);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Runs long work on a blocking thread and answers with its progress; the last line is its result.
fn run(
    core: &Arc<Core>,
    spooled: Option<tempfile::NamedTempFile>,
    work: impl FnOnce(&LayerStore, &CancelFlag, &(dyn Fn(ImportProgress) + Send + Sync)) -> Result<(), ImportError>
    + Send
    + 'static,
) -> Response {
    let (send, receive) = mpsc::channel(QUEUE);
    let store = core.layers.clone();
    let cancel = CancelFlag::new();
    let watcher = send.clone();
    let on_closed = CancelOnDrop(cancel.clone());
    let (done, finished) = tokio::sync::oneshot::channel::<()>();
    tokio::spawn(async move {
        // The watcher's own end of the channel must go with the work, or the answer would never end.
        tokio::select! {
            () = watcher.closed() => {}
            _ended = finished => {}
        }
        drop(on_closed);
    });
    let core = core.clone();
    tokio::spawn(async move {
        let _done = done;
        let last = Arc::new(std::sync::Mutex::new(None));
        let (kept, lines) = (last.clone(), send.clone());
        let worked = tokio::task::spawn_blocking(move || {
            let _spooled = spooled;
            let progress = |line: ImportProgress| match line {
                // The result is told when it is published.
                last @ (ImportProgress::Imported { .. } | ImportProgress::Built { .. }) => {
                    *kept.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(last);
                }
                other => lines.try_send(other).unwrap_or(()),
            };
            work(&store, &cancel, &progress)
        });
        let worked = match worked.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                tracing::warn!(error = %crate::error::chain(&error), "an import failed");
                Err(import_problem(&error))
            }
            Err(_) => Err(Problem::new(ErrorKind::Internal, "the import failed unexpectedly")),
        };
        let result = last.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        let published = match (worked, &result) {
            (Ok(()), Some(result)) => core.publish_layers(&layers_of(result)).await,
            (worked, _) => worked,
        };
        let line = match (published, result) {
            (Ok(()), Some(result)) => result,
            (Ok(()), None) => return,
            (Err(problem), _) => ImportProgress::Failed { problem },
        };
        // The result must not be lost; a reader that is gone needs none.
        send.send(line).await.unwrap_or(());
    });
    ndjson(receive)
}

/// The layers that a result names.
fn layers_of(result: &ImportProgress) -> Vec<Digest> {
    match result {
        ImportProgress::Imported { image } => image.layers.iter().map(|l| l.digest).collect(),
        ImportProgress::Built { layer } => vec![layer.digest],
        _ => Vec::new(),
    }
}

pub async fn usage(State(core): Node) -> Answer {
    json(StatusCode::OK, &core.layer_usage().await?)
}

pub async fn diff(State(core): Node, Body(request): Body<DiffOnNode>) -> Answer {
    core.ensure_layers(&[request.from.as_slice(), &request.to].concat(), "diff").await?;
    let compared =
        tokio::task::spawn_blocking(move || core.layers.diff(&request.from, &request.to, request.limit as usize));
    let compared = compared.await.map_err(|_| Problem::new(ErrorKind::Internal, "comparing the layers failed"))?;
    json(StatusCode::OK, &compared.map_err(|e| import_problem(&e))?)
}

/// An image as an archive. What can fail is found out before the answer begins; what fails later breaks it off.
pub async fn export(State(core): Node, Body(image): Body<ImageRecord>) -> Answer {
    const PIPE: usize = 1 << 20;
    const PIECE: usize = 256 << 10;
    let digests: Vec<Digest> = image.layers.iter().map(|l| l.digest).collect();
    core.ensure_layers(&digests, "export").await?;
    let cancel = CancelFlag::new();
    let on_closed = CancelOnDrop(cancel.clone());
    let (store, flag) = (core.layers.clone(), cancel.clone());
    let ready = tokio::task::spawn_blocking(move || store.export(&image, &flag)).await;
    let ready = ready.map_err(|_| Problem::new(ErrorKind::Internal, "the export failed unexpectedly"))?;
    let export = ready.map_err(|e| import_problem(&e))?;
    let (reader, writer) = tokio::io::duplex(PIPE);
    let writer = SyncIoBridge::new(writer);
    let written = tokio::task::spawn_blocking(move || export.write_to(writer, &cancel));
    let ended = futures_util::stream::once(async move {
        let _on_closed = on_closed;
        match written.await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => {
                tracing::warn!(error = %crate::error::chain(&error), "an export broke off");
                Some(Err(std::io::Error::other("the export broke off")))
            }
            Err(_) => Some(Err(std::io::Error::other("the export failed unexpectedly"))),
        }
    });
    let bytes = ReaderStream::with_capacity(reader, PIECE);
    let body = axum::body::Body::from_stream(bytes.chain(ended.filter_map(std::future::ready)));
    Ok(([(header::CONTENT_TYPE, "application/x-tar")], body).into_response())
}

pub async fn gc(State(core): Node, Body(request): Body<GcOnNode>) -> Answer {
    json(StatusCode::OK, &core.gc_layers(request).await?)
}

pub async fn layers(State(core): Node) -> Answer {
    let store = core.layers.clone();
    let listed = tokio::task::spawn_blocking(move || store.list()).await;
    let layers = listed
        .map_err(|_| Problem::new(ErrorKind::Internal, "listing the layers failed"))?
        .map_err(|e| store_problem(&e))?;
    json(StatusCode::OK, &LayerList { layers, next_cursor: None })
}

pub async fn delete_layer(State(core): Node, Path(text): Path<String>) -> Answer {
    let digest: Digest = text.parse().map_err(|e: corral_api::digest::DigestError| invalid(e.to_string()))?;
    let this = core.clone();
    let deleted = tokio::task::spawn_blocking(move || this.forget_layer(&digest, &|_| false));
    deleted
        .await
        .map_err(|_| Problem::new(ErrorKind::Internal, "deleting the layer failed"))?
        .map_err(|e| store_problem(&e))?;
    Ok(no_content())
}
