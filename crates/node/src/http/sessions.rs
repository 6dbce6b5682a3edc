//! Shell sessions.

use super::commands::{no_content, result_of};
use super::parts::{Answer, Body, Fail, Live, json};
use crate::commands::session::Session;
use crate::node::Core;
use crate::sandbox::Sandbox;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use corral_api::catalogue::SessionList;
use corral_api::command::{SessionRun, SessionSpec};
use corral_api::ids::SessionId;
use corral_api::problem::{ErrorKind, Problem};
use std::collections::HashMap;
use std::sync::Arc;

type Node = State<Arc<Core>>;

pub async fn open(State(core): Node, Live(sandbox): Live, Body(spec): Body<SessionSpec>) -> Answer {
    let _activity = core.enter(&sandbox).await?;
    json(StatusCode::CREATED, &core.open_session(&sandbox, spec).await?.status())
}

pub async fn list(Live(sandbox): Live) -> Answer {
    let mut sessions: Vec<_> = sandbox.lock().sessions.values().map(|s| s.status()).collect();
    sessions.sort_by(|a, b| a.id.cmp(&b.id));
    json(StatusCode::OK, &SessionList { sessions })
}

fn find(sandbox: &Sandbox, path: &HashMap<String, String>) -> Result<Arc<Session>, Fail> {
    let text = path.get("session_id").cloned().unwrap_or_default();
    let session = text.parse::<SessionId>().ok().and_then(|id| sandbox.lock().sessions.get(&id).cloned());
    session.ok_or_else(|| {
        let shown: String = text.chars().take(80).collect();
        Problem::new(ErrorKind::NotFound, format!("no session {shown:?}")).sandbox(&sandbox.id).into()
    })
}

pub async fn run(
    State(core): Node,
    Live(sandbox): Live,
    Path(path): Path<HashMap<String, String>>,
    Body(run): Body<SessionRun>,
) -> Answer {
    let session = find(&sandbox, &path)?;
    let activity = core.enter(&sandbox).await?;
    let command = core.run_in_session(&sandbox, &session, run).await?;
    drop(activity);
    result_of(&core, &sandbox, &command).await
}

pub async fn close(State(core): Node, Live(sandbox): Live, Path(path): Path<HashMap<String, String>>) -> Answer {
    let session = find(&sandbox, &path)?;
    core.close_session(&sandbox, &session).await?;
    Ok(no_content())
}
