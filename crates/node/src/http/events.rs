//! Events: a page, or a stream that resumes.

use super::parts::{Answer, Params, invalid, json};
use crate::node::Core;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::response::sse::{Event as Line, KeepAlive, Sse};
use corral_api::ids::SandboxId;
use corral_api::query::EventQuery;
use corral_api::sandbox::{Event, EventPage};
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::sync::broadcast;

/// Most events of a page, and how many without a limit.
const PAGE: (u32, u32) = (10_000, 1000);

pub async fn read(State(core): State<Arc<Core>>, Params(query): Params<EventQuery>, headers: HeaderMap) -> Answer {
    let sandbox: Option<SandboxId> = query
        .sandbox_id
        .as_ref()
        .map(|text| text.parse().map_err(|_| invalid("sandbox_id: no id of a sandbox")))
        .transpose()?;
    let wants =
        |kind: &str| headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).is_some_and(|v| v.contains(kind));
    if wants("text/event-stream") {
        let last_seen = headers.get("last-event-id").and_then(|v| v.to_str().ok()).and_then(|v| v.parse().ok());
        // Without a place to go on from, a stream begins now.
        let after = last_seen.or(query.after).unwrap_or_else(|| core.events.last());
        return Ok(stream(core, after, sandbox));
    }
    let after = query.after.unwrap_or(0);
    let limit = query.limit.unwrap_or(PAGE.1).clamp(1, PAGE.0);
    // What was recorded before this request is in the page.
    let events = core.read_settled(move |ledger| {
        let (first, _) = ledger.event_range()?;
        Ok((ledger.events(after, sandbox.as_ref(), limit)?, first))
    });
    let (events, first) = events.await?;
    let last_seq = events.last().map_or_else(|| after.max(core.events.last().min(after)), |e| e.seq);
    json(StatusCode::OK, &EventPage { events, last_seq, gap: first > after + 1 })
}

struct Following {
    core: Arc<Core>,
    after: u64,
    sandbox: Option<SandboxId>,
    listener: broadcast::Receiver<Event>,
    ready: VecDeque<Event>,
    /// Events may have been missed: the ledger has them.
    behind: bool,
}

fn stream(core: Arc<Core>, after: u64, sandbox: Option<SandboxId>) -> axum::response::Response {
    let listener = core.events.listen();
    let following = Following { core, after, sandbox, listener, ready: VecDeque::new(), behind: true };
    let lines = futures_util::stream::unfold(following, async |mut following| {
        let event = following.next().await?;
        let line = Line::default().id(event.seq.to_string()).json_data(&event).unwrap_or_default();
        Some((Ok::<_, std::convert::Infallible>(line), following))
    });
    Sse::new(lines).keep_alive(KeepAlive::default()).into_response()
}

impl Following {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                self.after = event.seq;
                return Some(event);
            }
            if self.behind {
                let (after, sandbox) = (self.after, self.sandbox.clone());
                let read = self.core.read_settled(move |ledger| ledger.events(after, sandbox.as_ref(), PAGE.1)).await;
                self.ready = read.ok()?.into();
                self.behind = self.ready.len() == PAGE.1 as usize;
                continue;
            }
            match self.listener.recv().await {
                Ok(event) => {
                    let fits = self.sandbox.as_ref().is_none_or(|s| *s == event.sandbox_id);
                    if fits && event.seq > self.after {
                        self.ready.push_back(event);
                    }
                }
                Err(broadcast::error::RecvError::Lagged(_)) => self.behind = true,
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    }
}
