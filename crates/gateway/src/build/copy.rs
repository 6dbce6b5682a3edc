//! `COPY` and `ADD` into the sandbox of a stage.

use super::bench::Bench;
use super::context::spool;
use super::error::Failure;
use super::pieces::{self, Piece, Placing};
use super::tree::Tree;
use crate::refusal::Refusal;
use crate::state::Gw;
use corral_api::ids::SandboxId;
use corral_api::problem::{ErrorKind, Problem};
use corral_dockerfile::{CopySource, CopyStep, EntryKind, clean_text};
use std::sync::Arc;

/// Files of the platform in every sandbox, which belong to no image.
const PLATFORM: [&[u8]; 3] = [b"etc/hosts", b"etc/hostname", b"etc/resolv.conf"];

/// Runs blocking work.
///
/// # Errors
/// What the work fails with.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Refusal> {
    let done = tokio::task::spawn_blocking(work).await;
    Ok(done.map_err(|error| Refusal::internal("a step of a build", &error))??)
}

/// Puts pieces in place as the step says.
///
/// # Errors
/// An owner is unknown, the destination is in the way, or the node refuses.
pub async fn put(
    bench: &Bench,
    id: &SandboxId,
    step: &CopyStep,
    tree: Arc<Tree>,
    pieces: Vec<Piece>,
) -> Result<(), Failure> {
    let owner = match &step.chown {
        None => None,
        Some(text) => {
            let passwd = bench.read_text(id, "/etc/passwd").await?.unwrap_or_default();
            let group = bench.read_text(id, "/etc/group").await?.unwrap_or_default();
            Some(corral_dockerfile::owner(text, &passwd, &group).map_err(|e| Failure::build(e.to_string()))?)
        }
    };
    let is_file = |piece: &Piece| match &piece.what {
        pieces::What::Entry(entry) => entry.kind != EntryKind::Directory,
        pieces::What::Text(_) => true,
        pieces::What::Archive(..) => false,
    };
    let mut target = step.dest.clone();
    let mut rename = None;
    let alone = matches!(pieces.as_slice(), [piece] if !piece.inner && is_file(piece));
    if alone && !step.into_directory && bench.is_directory(id, &target).await? != Some(true) {
        let (parent, name) = target.rsplit_once('/').unwrap_or(("", &target));
        rename = Some(name.to_owned());
        target = if parent.is_empty() { "/".to_owned() } else { parent.to_owned() };
    }
    // The nearest directory that is there; what is missing below it is made with the same owner.
    let mut missing = Vec::new();
    loop {
        match bench.is_directory(id, &target).await? {
            Some(true) => break,
            Some(false) => return Err(Failure::build(format!("{target} is no directory"))),
            None => {
                let (parent, name) = target.rsplit_once('/').unwrap_or(("", ""));
                missing.insert(0, name.to_owned());
                target = if parent.is_empty() { "/".to_owned() } else { parent.to_owned() };
            }
        }
    }
    let (body, task) = pieces::stream(tree, pieces, Placing { missing, rename, owner, mode: step.chmod });
    let sent = bench.tar_in(id, &target, body).await;
    let made = task.await.map_err(|error| Refusal::internal("a step of a build", &error))?;
    match (sent, made) {
        (Ok(()), Ok(())) => Ok(()),
        // The node ended the stream and has said why.
        (Err(refusal), Ok(())) => Err(refusal.into()),
        // So it has here, and what failed is the writing to it.
        (Err(refusal), Err(problem)) if problem.kind == ErrorKind::StorageError => Err(refusal.into()),
        (_, Err(problem)) => Err(Refusal::from(problem).into()),
    }
}

/// Fetches what the sources of a step may mean in a sandbox.
///
/// # Errors
/// A source is not there, or the node refuses.
pub async fn fetch(gw: &Gw, bench: &Bench, id: &SandboxId, step: &CopyStep) -> Result<Tree, Failure> {
    let mut merged: Option<Tree> = None;
    for source in &step.sources {
        let CopySource::Path(source) = source else { continue };
        let cleaned = clean_text(source).unwrap_or_default();
        // A pattern is matched in the deepest directory that is named without one.
        let plain: Vec<&str> = cleaned.split('/').take_while(|name| !name.contains(['*', '?', '[', '\\'])).collect();
        let prefix = plain.join("/");
        let is_directory = bench.is_directory(id, &format!("/{prefix}")).await?;
        let shown: String = source.chars().take(80).collect();
        let is_directory =
            is_directory.ok_or_else(|| Failure::build(format!("source {shown:?}: there is no such file")))?;
        let body = bench.tar_out(id, &format!("/{prefix}")).await?;
        let limit = gw.config.build_limit_bytes;
        let file = spool(body, &gw.config.spool_dir, limit, "what a stage holds").await?;
        let below = match (is_directory, prefix.rsplit_once('/')) {
            (true, _) => prefix.clone(),
            (false, Some((parent, _))) => parent.to_owned(),
            (false, None) => String::new(),
        };
        let mut tree = blocking(move || Tree::index(file, &below, "what a stage holds")).await?;
        if is_directory {
            tree.entries.retain(|path, _| !PLATFORM.contains(&path.as_slice()));
        }
        merged = Some(match merged {
            None => tree,
            Some(before) => blocking(move || before.and(tree, "what a stage holds")).await?,
        });
    }
    merged.ok_or_else(|| Failure::build("nothing is copied"))
}
