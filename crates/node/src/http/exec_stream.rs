//! A command's output as events, as it comes.

use super::parts::ndjson;
use crate::commands::Command;
use crate::commands::output::OutputReader;
use crate::node::Core;
use crate::sandbox::Activity;
use axum::response::Response;
use base64::Engine;
use corral_api::command::{ExecEvent, StreamName};
use corral_api::problem::Problem;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Events waiting for a slow reader; the log holds the rest.
const QUEUE: usize = 16;

/// Streams a command that runs or ran. It goes on when the reader hangs up; the log has everything.
pub fn events(core: Arc<Core>, command: Arc<Command>, activity: Activity) -> Response {
    let (send, receive) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        let _activity = activity;
        if send.send(ExecEvent::Started { command_id: command.id.clone() }).await.is_err() {
            return;
        }
        let both = futures_util::future::join(
            forward(&core, &command, StreamName::Stdout, &send),
            forward(&core, &command, StreamName::Stderr, &send),
        );
        let last = match both.await {
            (Ok(()), Ok(())) => match command.wait().await {
                Ok(_) => ExecEvent::Ended { command: command.status() },
                Err(problem) => ExecEvent::Failed { problem },
            },
            (Err(problem), _) | (_, Err(problem)) => ExecEvent::Failed { problem },
        };
        // A reader that hung up needs no end.
        send.send(last).await.unwrap_or(());
    });
    ndjson(receive)
}

async fn forward(
    core: &Core,
    command: &Command,
    stream: StreamName,
    send: &mpsc::Sender<ExecEvent>,
) -> Result<(), Problem> {
    let record = command.lock().clone();
    let mut reader: OutputReader = core.open_output(&record, Some(command), stream)?;
    let mut at = 0;
    while let Some(chunk) = reader.next(at, true).await? {
        at = chunk.offset + chunk.bytes.len() as u64;
        let base64 = base64::engine::general_purpose::STANDARD.encode(&chunk.bytes);
        if send.send(ExecEvent::Output { stream, offset: chunk.offset, base64 }).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}
