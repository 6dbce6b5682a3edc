//! Terminals over WebSocket: binary frames are bytes, text frames are `PtyMessage`s. The terminal belongs to a command:
//! it goes on when the connection breaks, and is come back to by its id and an offset.

use super::parts::{Answer, Live, Params, invalid};
use crate::commands::{Command, Terminal};
use crate::node::Core;
use crate::sandbox::Sandbox;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{RawQuery, State};
use corral_api::command::{ExecSpec, PtyMessage, StreamName};
use corral_api::ids::CommandId;
use corral_api::problem::{ErrorKind, Problem};
use futures_util::{SinkExt, StreamExt};
use serde::Deserialize;
use std::sync::Arc;

type Node = State<Arc<Core>>;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct PtyQuery {
    cwd: Option<String>,
    user: Option<String>,
    cols: Option<u16>,
    rows: Option<u16>,
    command_id: Option<String>,
    offset: Option<u64>,
}

pub async fn open(
    State(core): Node,
    Live(sandbox): Live,
    Params(query): Params<PtyQuery>,
    RawQuery(raw): RawQuery,
    upgrade: Result<WebSocketUpgrade, axum::extract::ws::rejection::WebSocketUpgradeRejection>,
) -> Answer {
    let upgrade = upgrade.map_err(|e| invalid(format!("a WebSocket is needed: {}", e.body_text())))?;
    let activity = core.enter(&sandbox).await?;
    let command = match &query.command_id {
        Some(text) => {
            let found = text.parse::<CommandId>().ok().and_then(|id| sandbox.command(&id));
            found.ok_or_else(|| Problem::new(ErrorKind::NotFound, "no such command").sandbox(&sandbox.id))?
        }
        None => {
            let argv = arguments(raw.as_deref().unwrap_or(""));
            let shells = if argv.is_empty() {
                vec![vec!["/bin/bash".to_owned()], vec!["/bin/sh".to_owned()]]
            } else {
                vec![argv]
            };
            let size = Terminal { cols: query.cols.unwrap_or(80), rows: query.rows.unwrap_or(24) };
            start_first(&core, &sandbox, shells, &query, size).await?
        }
    };
    let offset = query.offset.unwrap_or(0);
    Ok(upgrade.on_upgrade(async move |socket| {
        bridge(core, sandbox, command, offset, socket).await;
        drop(activity);
    }))
}

/// Values of the repeated parameter `argv`.
fn arguments(raw: &str) -> Vec<String> {
    super::sandboxes::url_pairs(raw).into_iter().filter(|(key, _)| key == "argv").map(|(_, value)| value).collect()
}

async fn start_first(
    core: &Arc<Core>,
    sandbox: &Arc<Sandbox>,
    candidates: Vec<Vec<String>>,
    query: &PtyQuery,
    size: Terminal,
) -> Result<Arc<Command>, Problem> {
    let mut last = Problem::new(ErrorKind::CommandNotStarted, "no shell");
    for argv in candidates {
        let spec = ExecSpec { argv, cwd: query.cwd.clone(), user: query.user.clone(), ..ExecSpec::default() };
        match core.exec(sandbox, spec, Some(size)).await {
            Err(problem) if problem.kind == ErrorKind::CommandNotStarted => last = problem,
            other => return other,
        }
    }
    Err(last)
}

async fn bridge(core: Arc<Core>, sandbox: Arc<Sandbox>, command: Arc<Command>, offset: u64, socket: WebSocket) {
    let (mut sink, mut stream) = socket.split();
    let outward = async {
        let text = |message: &PtyMessage| Message::Text(serde_json::to_string(message).unwrap_or_default().into());
        let started = PtyMessage::Started { command_id: command.id.clone() };
        sink.send(text(&started)).await.ok()?;
        let record = command.lock().clone();
        let mut reader = core.open_output(&record, Some(&command), StreamName::Stdout).ok()?;
        let mut at = offset;
        while let Ok(Some(chunk)) = reader.next(at, true).await {
            at = chunk.offset + chunk.bytes.len() as u64;
            sink.send(Message::Binary(chunk.bytes.into())).await.ok()?;
        }
        let outcome = command.wait().await.ok()?;
        let exit_code = outcome.shell_status();
        sink.send(text(&PtyMessage::Ended { outcome, exit_code })).await.ok()?;
        sink.close().await.ok()
    };
    let inward = async {
        while let Some(Ok(message)) = stream.next().await {
            let taken = match message {
                Message::Binary(bytes) => core.write_input(&sandbox, &command, &bytes, false).await,
                Message::Text(text) => match serde_json::from_str(&text) {
                    Ok(PtyMessage::Resize { cols, rows }) => core.resize(&command, cols, rows).await,
                    _ => Ok(()),
                },
                Message::Close(_) => break,
                Message::Ping(_) | Message::Pong(_) => Ok(()),
            };
            if let Err(problem) = taken {
                tracing::debug!(sandbox_id = %sandbox.id, %problem, "a terminal takes no input");
            }
        }
    };
    tokio::select! {
        _sent = outward => {}
        () = inward => {}
    }
}
