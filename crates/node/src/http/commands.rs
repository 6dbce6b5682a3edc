//! Commands: run, look at, read, write to, signal.

use super::parts::{Answer, Body, Fail, Live, Named, OfCommand, Params, drain, invalid, json};
use crate::commands::Command;
use crate::commands::output::OutputReader;
use crate::node::Core;
use crate::sandbox::Sandbox;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use corral_api::catalogue::CommandList;
use corral_api::command::{ExecSpec, SignalRequest, StreamName};
use corral_api::problem::{ErrorKind, Problem};
use corral_api::query::{ExecQuery, OutputQuery, StdinQuery, WaitQuery};
use futures_util::{StreamExt, TryStreamExt};
use std::sync::Arc;
use std::time::Duration;

type Node = State<Arc<Core>>;

pub async fn exec(
    State(core): Node,
    Live(sandbox): Live,
    Params(query): Params<ExecQuery>,
    Body(spec): Body<ExecSpec>,
) -> Answer {
    let activity = core.enter(&sandbox).await?;
    let background = spec.background;
    let command = core.exec(&sandbox, spec, None).await?;
    if query.stream {
        return Ok(super::exec_stream::events(core, command, activity));
    }
    if background {
        return json(StatusCode::ACCEPTED, &command.status());
    }
    command.wait().await?;
    drop(activity);
    result_of(&core, &sandbox, &command).await
}

/// The result of an ended command; a sandbox that ended under it is an error.
pub async fn result_of(core: &Arc<Core>, sandbox: &Arc<Sandbox>, command: &Arc<Command>) -> Answer {
    let record = command.lock().clone();
    if record.end == Some(corral_api::command::Outcome::SandboxEnded) {
        return Err(crate::node::ended_problem(&sandbox.record_with_end()).into());
    }
    json(StatusCode::OK, &core.result(&record, Some(command)).await?)
}

pub async fn list(State(core): Node, Named(id): Named) -> Answer {
    let commands = match core.live(&id) {
        Some(sandbox) => {
            let mut all: Vec<Arc<Command>> = sandbox.lock().commands.values().cloned().collect();
            all.sort_by_key(|c| (c.lock().started_ms, c.id.clone()));
            all.iter().map(|c| sandbox.status_of(c)).collect()
        }
        None => {
            if core.ended(&id).await?.is_none() {
                return Err(Problem::new(ErrorKind::NotFound, format!("no sandbox {id}")).sandbox(&id).into());
            }
            let records = core.read_ledger(move |ledger| ledger.commands(&id)).await?;
            records.iter().map(|r| r.status(r.totals)).collect()
        }
    };
    json(StatusCode::OK, &CommandList { commands })
}

pub async fn get(State(_): Node, Params(query): Params<WaitQuery>, of: OfCommand) -> Answer {
    let Some((sandbox, command)) = of.live else { return json(StatusCode::OK, &of.record.status(of.record.totals)) };
    if let Some(ms) = query.wait_ms {
        // Not ended in time is an answer, too.
        let _in_time = tokio::time::timeout(Duration::from_millis(ms), command.wait()).await;
    }
    json(StatusCode::OK, &sandbox.status_of(&command))
}

pub async fn result(State(core): Node, of: OfCommand) -> Answer {
    let record = match &of.live {
        Some((_, command)) => command.lock().clone(),
        None => of.record,
    };
    json(StatusCode::OK, &core.result(&record, of.live.as_ref().map(|(_, c)| c)).await?)
}

/// Octets of a stream. They are without a gap: where bytes were dropped the answer ends, and the next one begins
/// behind the gap.
pub async fn output(State(core): Node, Params(query): Params<OutputQuery>, of: OfCommand) -> Answer {
    let stream = query.stream.unwrap_or(StreamName::Stdout);
    let live = of.live.as_ref().map(|(_, c)| c.as_ref());
    let mut reader = core.open_output(&of.record, live, stream)?;
    let wanted = query.offset.unwrap_or(0);
    let total = reader.total();
    if wanted > total && !query.follow {
        let text = format!("offset {wanted} lies beyond the {total} bytes there are");
        return Err(Problem::new(ErrorKind::RangeNotSatisfiable, text).into());
    }
    let first = if query.follow { None } else { reader.next(wanted, false).await? };
    let dropped = of.record.dropped(total);
    let offset = match &first {
        Some(chunk) => chunk.offset,
        None if (dropped.0..dropped.1).contains(&wanted) => dropped.1,
        None => wanted,
    };
    let mut headers = HeaderMap::new();
    let truncated = dropped.0 != dropped.1;
    headers.insert("corral-offset", HeaderValue::from(offset));
    headers.insert("corral-total", HeaderValue::from(total));
    headers.insert("corral-truncated", HeaderValue::from_static(if truncated { "true" } else { "false" }));
    headers.insert("corral-dropped-to", HeaderValue::from(if truncated { dropped.1 } else { 0 }));
    headers.insert("content-type", HeaderValue::from_static("application/octet-stream"));
    let left = query.limit.unwrap_or(u64::MAX);
    let body = Reading { reader, at: offset, left, follow: query.follow, first };
    let activity = of.live.map(|(sandbox, _)| sandbox.begin());
    let bytes = futures_util::stream::try_unfold((body, activity), async |(mut body, activity)| {
        Ok::<_, std::io::Error>(body.piece().await?.map(|bytes| (bytes, (body, activity))))
    });
    Ok((headers, axum::body::Body::from_stream(bytes.into_stream())).into_response())
}

struct Reading {
    reader: OutputReader,
    at: u64,
    left: u64,
    follow: bool,
    first: Option<corral_runtime::log_reader::Chunk>,
}

impl Reading {
    async fn piece(&mut self) -> std::io::Result<Option<Bytes>> {
        if self.left == 0 {
            return Ok(None);
        }
        let chunk = match self.first.take() {
            Some(chunk) => Some(chunk),
            None => self.reader.next(self.at, self.follow).await.map_err(std::io::Error::other)?,
        };
        let Some(mut chunk) = chunk.filter(|c| c.offset == self.at) else { return Ok(None) };
        chunk.bytes.truncate(usize::try_from(self.left).unwrap_or(usize::MAX));
        self.at += chunk.bytes.len() as u64;
        self.left -= chunk.bytes.len() as u64;
        Ok(Some(chunk.bytes.into()))
    }
}

fn live(of: OfCommand) -> Result<(Arc<Sandbox>, Arc<Command>), Fail> {
    of.live.ok_or_else(|| {
        Problem::new(ErrorKind::SandboxEnded, "the sandbox of this command has ended")
            .sandbox(&of.record.sandbox)
            .into()
    })
}

pub async fn stdin(State(core): Node, Params(query): Params<StdinQuery>, of: OfCommand, request: Request) -> Answer {
    let (sandbox, command) = live(of)?;
    let _activity = core.enter(&sandbox).await?;
    let mut body = request.into_body().into_data_stream();
    while let Some(piece) = body.next().await {
        let piece = piece.map_err(|_| invalid("the body broke off"))?;
        if let Err(problem) = core.write_input(&sandbox, &command, &piece, false).await {
            drain(&mut body).await;
            return Err(problem.into());
        }
    }
    if query.close {
        core.write_input(&sandbox, &command, &[], true).await?;
    }
    Ok(no_content())
}

pub async fn signal(State(core): Node, of: OfCommand, Body(request): Body<SignalRequest>) -> Answer {
    let (sandbox, command) = live(of)?;
    core.signal(&sandbox, &command, &request.signal, request.tree).await?;
    Ok(no_content())
}

pub fn no_content() -> Response {
    StatusCode::NO_CONTENT.into_response()
}
