//! Files inside a sandbox.

use super::commands::no_content;
use super::parts::{Answer, Body, Fail, Live, Params, drain, invalid, json};
use crate::commands::find_user;
use crate::error::runtime_problem;
use crate::node::Core;
use crate::sandbox::{Activity, Sandbox};
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::IntoResponse;
use axum::response::sse::{Event, KeepAlive, Sse};
use corral_api::files::{DirectoryPage, FileStatus, MkdirRequest, MoveRequest, WatchEvent};
use corral_api::problem::{ErrorKind, Problem};
use corral_api::query::{FileListQuery, FileQuery, FileTreeQuery, FileWrite, TarWrite};
use corral_guest::protocol::Op;
use corral_runtime::container::files::FileWorker;
use futures_util::{Stream, StreamExt};
use std::sync::Arc;

type Node = State<Arc<Core>>;

/// Starts a worker for an operation as a user, the environment's where none is named.
async fn begin(
    core: &Arc<Core>,
    sandbox: &Arc<Sandbox>,
    user: Option<&str>,
    op: impl FnOnce(&dyn Fn(String) -> String) -> Op,
) -> Result<(FileWorker, Activity), Fail> {
    let activity = core.enter(sandbox).await?;
    let gate = sandbox.gate.read().await;
    let (init, config) = {
        let inner = sandbox.lock();
        (inner.init, inner.record.environment.config.clone())
    };
    let user = find_user(init, user.unwrap_or(&config.user)).await.map_err(|p| core.judge(sandbox, p))?;
    let link = core.link_of(sandbox)?;
    let absolute = move |path: String| config.absolute(&path);
    let worker = core.containers.begin(&link, &sandbox.id, &user, &op(&absolute)).await;
    drop(gate);
    let worker = worker.map_err(|error| match error {
        corral_runtime::RuntimeError::Gone => {
            Problem::new(ErrorKind::SandboxEnded, "the sandbox has ended").sandbox(&sandbox.id)
        }
        other => core.judge(sandbox, runtime_problem(&other)),
    })?;
    Ok((worker, activity))
}

fn check(path: &str) -> Result<(), Fail> {
    if path.is_empty() || path.contains('\0') || path.len() > 4095 {
        return Err(invalid("path: 1–4095 bytes without NUL"));
    }
    Ok(())
}

async fn simple(
    core: &Arc<Core>,
    sandbox: &Arc<Sandbox>,
    user: Option<&str>,
    op: impl FnOnce(&dyn Fn(String) -> String) -> Op,
) -> Result<Option<FileStatus>, Fail> {
    let (mut worker, _activity) = begin(core, sandbox, user, op).await?;
    worker.result().await.map_err(|e| core.judge(sandbox, runtime_problem(&e)).into())
}

fn status(found: Option<FileStatus>) -> Answer {
    match found {
        Some(status) => json(StatusCode::OK, &status),
        None => Err(Problem::new(ErrorKind::Internal, "the worker told no status").into()),
    }
}

/// A part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// From a byte on, and how many bytes at most.
    From(u64, Option<u64>),
    /// So many bytes before its end.
    Last(u64),
}

impl Part {
    const WHOLE: Self = Self::From(0, None);

    /// First byte and number of bytes in a file of this size.
    fn of(self, size: u64) -> (u64, u64) {
        match self {
            Self::From(first, most) => (first.min(size), most.unwrap_or(u64::MAX).min(size.saturating_sub(first))),
            Self::Last(bytes) => (size.saturating_sub(bytes), bytes.min(size)),
        }
    }
}

/// The part that a `Range` header with one range names; nothing for what RFC 9110 lets a server ignore.
fn range(headers: &HeaderMap) -> Option<Part> {
    let text = headers.get(header::RANGE)?.to_str().ok()?.strip_prefix("bytes=")?;
    let (first, last) = text.split_once('-')?;
    // The standard's digits only: a parser of numbers also takes a sign.
    // A number beyond all sizes is as good as the largest.
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let number = |text: &str| digits(text).then(|| text.parse::<u64>().unwrap_or(u64::MAX));
    match (first, last) {
        ("", last) => number(last).map(Part::Last),
        (first, "") => number(first).map(|first| Part::From(first, None)),
        (first, last) => {
            let (first, last) = (number(first)?, number(last)?);
            (last >= first).then(|| Part::From(first, (last - first).checked_add(1)))
        }
    }
}

pub async fn read(
    State(core): Node,
    Live(sandbox): Live,
    Params(query): Params<FileQuery>,
    headers: HeaderMap,
) -> Answer {
    check(&query.path)?;
    let range = range(&headers);
    let part = range.unwrap_or(Part::WHOLE);
    let path = query.path;
    let op = |abs: &dyn Fn(String) -> String| match part {
        Part::From(offset, limit) => Op::Read { path: abs(path), offset, limit },
        Part::Last(bytes) => Op::ReadEnd { path: abs(path), bytes },
    };
    let (mut worker, activity) = begin(&core, &sandbox, query.user.as_deref(), op).await?;
    let found = worker.result().await.map_err(|e| core.judge(&sandbox, runtime_problem(&e)))?;
    let size = found.map_or(0, |s| s.size_bytes);
    let (offset, length) = part.of(size);
    if range.is_some() && length == 0 {
        let text = format!("range: nothing of it lies in the file's {size} bytes");
        let problem = Problem::new(ErrorKind::RangeNotSatisfiable, text).sandbox(&sandbox.id);
        let mut refused = Fail::from(problem).into_response();
        refused.headers_mut().insert(header::CONTENT_RANGE, content_range(format!("bytes */{size}"))?);
        return Ok(refused);
    }
    let mut answer = HeaderMap::new();
    answer.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    answer.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    answer.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    let mut code = StatusCode::OK;
    if range.is_some() {
        code = StatusCode::PARTIAL_CONTENT;
        let text = format!("bytes {offset}-{}/{size}", offset + length - 1);
        answer.insert(header::CONTENT_RANGE, content_range(text)?);
    }
    // A file that grows meanwhile is cut at the length that was promised.
    let body = data(worker, activity, Some(length));
    Ok((code, answer, axum::body::Body::from_stream(body)).into_response())
}

fn content_range(text: String) -> Result<HeaderValue, Fail> {
    HeaderValue::try_from(text).map_err(|_| invalid("range"))
}

/// The bytes of a read or archive; a worker that breaks off breaks the answer off.
fn data(
    worker: FileWorker,
    activity: Activity,
    length: Option<u64>,
) -> impl Stream<Item = std::io::Result<Bytes>> + Send + 'static {
    futures_util::stream::try_unfold((worker, activity, length), async |(mut worker, activity, left)| {
        if left == Some(0) {
            return Ok(None);
        }
        match worker.data().await {
            Ok(Some(mut bytes)) => {
                let mut left = left;
                if let Some(left) = &mut left {
                    bytes.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
                    *left -= bytes.len() as u64;
                }
                Ok(Some((bytes, (worker, activity, left))))
            }
            Ok(None) if left.is_none() => Ok(None),
            Ok(None) => Err(std::io::Error::other("the file became shorter while it was read")),
            Err(error) => {
                tracing::warn!(%error, "an answer with a sandbox's files breaks off");
                Err(std::io::Error::other(error))
            }
        }
    })
}

/// Sends a request's body to a worker and returns its result.
async fn put(
    core: &Core,
    sandbox: &Sandbox,
    mut worker: FileWorker,
    request: Request,
) -> Result<Option<FileStatus>, Fail> {
    let problem = |e: &corral_runtime::RuntimeError| Fail::from(core.judge(sandbox, runtime_problem(e)));
    let mut body = request.into_body().into_data_stream();
    while let Some(piece) = body.next().await {
        // Dropping the worker's socket makes it undo what it began.
        let piece = piece.map_err(|_| invalid("the upload broke off; nothing was changed"))?;
        if worker.put(&piece).await.is_err() {
            // It ended early and has said why.
            drain(&mut body).await;
            return worker.result().await.map_err(|e| problem(&e));
        }
    }
    // One that ended early has said why.
    worker.finish().await.unwrap_or(());
    worker.result().await.map_err(|e| problem(&e))
}

pub async fn write(
    State(core): Node,
    Live(sandbox): Live,
    Params(query): Params<FileWrite>,
    request: Request,
) -> Answer {
    check(&query.path)?;
    if query.path.ends_with('/') {
        return Err(invalid("path: it ends in /, but a file is written: name it, or make a directory with mkdir"));
    }
    if query.mode.is_some_and(|m| m > 0o7777) {
        return Err(invalid("mode: at most 4095 (07777)"));
    }
    let FileWrite { path, user, mode, parents } = query;
    let (worker, _activity) =
        begin(&core, &sandbox, user.as_deref(), |abs| Op::Write { path: abs(path), mode, parents }).await?;
    status(put(&core, &sandbox, worker, request).await?)
}

pub async fn remove(State(core): Node, Live(sandbox): Live, Params(query): Params<FileTreeQuery>) -> Answer {
    check(&query.path)?;
    let FileTreeQuery { path, user, recursive } = query;
    simple(&core, &sandbox, user.as_deref(), |abs| Op::Remove { path: abs(path), recursive }).await?;
    Ok(no_content())
}

pub async fn stat(State(core): Node, Live(sandbox): Live, Params(query): Params<FileQuery>) -> Answer {
    check(&query.path)?;
    let FileQuery { path, user } = query;
    status(simple(&core, &sandbox, user.as_deref(), |abs| Op::Stat { path: abs(path) }).await?)
}

pub async fn list(State(core): Node, Live(sandbox): Live, Params(query): Params<FileListQuery>) -> Answer {
    const DEFAULT_LIMIT: u32 = 1000;
    const MAX_DEPTH: u32 = 64;
    check(&query.path)?;
    let FileListQuery { path, user, depth, limit } = query;
    let depth = depth.unwrap_or(1);
    if !(1..=MAX_DEPTH).contains(&depth) {
        return Err(invalid(format!("depth: 1–{MAX_DEPTH}")));
    }
    let limit = limit.unwrap_or(DEFAULT_LIMIT);
    let (mut worker, _activity) =
        begin(&core, &sandbox, user.as_deref(), |abs| Op::List { path: abs(path), depth, limit }).await?;
    let (entries, truncated) = worker.entries().await.map_err(|e| core.judge(&sandbox, runtime_problem(&e)))?;
    json(StatusCode::OK, &DirectoryPage { entries, truncated })
}

pub async fn mkdir(State(core): Node, Live(sandbox): Live, Body(request): Body<MkdirRequest>) -> Answer {
    check(&request.path)?;
    let MkdirRequest { path, parents, mode, user } = request;
    let mode = mode.unwrap_or(0o755);
    let made = simple(&core, &sandbox, user.as_deref(), |abs| Op::Mkdir { path: abs(path), parents, mode }).await?;
    status(made)
}

pub async fn rename(State(core): Node, Live(sandbox): Live, Body(request): Body<MoveRequest>) -> Answer {
    check(&request.from)?;
    check(&request.to)?;
    let MoveRequest { from, to, overwrite, user } = request;
    let op = |abs: &dyn Fn(String) -> String| Op::Move { from: abs(from), to: abs(to), overwrite };
    status(simple(&core, &sandbox, user.as_deref(), op).await?)
}

pub async fn tar_out(State(core): Node, Live(sandbox): Live, Params(query): Params<FileQuery>) -> Answer {
    check(&query.path)?;
    let FileQuery { path, user } = query;
    let (mut worker, activity) = begin(&core, &sandbox, user.as_deref(), |abs| Op::TarOut { path: abs(path) }).await?;
    worker.result().await.map_err(|e| core.judge(&sandbox, runtime_problem(&e)))?;
    let body = axum::body::Body::from_stream(data(worker, activity, None));
    Ok(([(header::CONTENT_TYPE, "application/x-tar")], body).into_response())
}

pub async fn tar_in(
    State(core): Node,
    Live(sandbox): Live,
    Params(query): Params<TarWrite>,
    request: Request,
) -> Answer {
    check(&query.path)?;
    let TarWrite { path, user, owners } = query;
    let (worker, _activity) =
        begin(&core, &sandbox, user.as_deref(), |abs| Op::TarIn { path: abs(path), owners }).await?;
    put(&core, &sandbox, worker, request).await?;
    Ok(no_content())
}

pub async fn watch(State(core): Node, Live(sandbox): Live, Params(query): Params<FileTreeQuery>) -> Answer {
    check(&query.path)?;
    let FileTreeQuery { path, user, recursive } = query;
    let (mut worker, activity) =
        begin(&core, &sandbox, user.as_deref(), |abs| Op::Watch { path: abs(path), recursive }).await?;
    // The first word tells whether the watch is in place.
    let first = worker.change().await.map_err(|e| core.judge(&sandbox, runtime_problem(&e)))?;
    let events = futures_util::stream::unfold((worker, activity, first), async |(mut worker, activity, waiting)| {
        let event = match waiting {
            Some(event) => event,
            // A watch that fails later ends its stream.
            None => worker.change().await.ok().flatten()?,
        };
        let line = Event::default().event(name_of(&event)).json_data(&event).unwrap_or_default();
        Some((Ok::<_, std::convert::Infallible>(line), (worker, activity, None)))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()).into_response())
}

const fn name_of(event: &WatchEvent) -> &'static str {
    match event {
        WatchEvent::Ready => "ready",
        WatchEvent::Created { .. } => "created",
        WatchEvent::Modified { .. } => "modified",
        WatchEvent::Removed { .. } => "removed",
        WatchEvent::Attributes { .. } => "attributes",
        WatchEvent::Overflow => "overflow",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        let of = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::RANGE, HeaderValue::from_str(text).unwrap());
            range(&headers)
        };
        assert_eq!(of("bytes=5-"), Some(Part::From(5, None)));
        assert_eq!(of("bytes=0-0"), Some(Part::From(0, Some(1))));
        assert_eq!(of("bytes=-5"), Some(Part::Last(5)));
        assert_eq!(of("bytes=0-18446744073709551615"), Some(Part::From(0, None)));
        assert_eq!(of("bytes=99999999999999999999999-"), Some(Part::From(u64::MAX, None)));
        for ignored in ["bytes=5-2", "bytes=-", "bytes=--5", "bytes=+1-2", "items=1-2", "bytes=a-b", "bytes=0-1,3-4"] {
            assert_eq!(of(ignored), None, "{ignored}");
        }
    }

    #[test]
    fn parts_of_a_file() {
        assert_eq!(Part::WHOLE.of(9), (0, 9));
        assert_eq!(Part::From(5, Some(100)).of(9), (5, 4));
        assert_eq!(Part::From(9, None).of(9), (9, 0));
        assert_eq!(Part::Last(3).of(9), (6, 3));
        assert_eq!((Part::Last(30).of(9), Part::Last(3).of(0)), ((0, 9), (0, 0)));
    }
}
