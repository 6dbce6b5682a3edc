//! `corral sh`: a terminal over WebSocket.

use super::exec::exit_code;
use crate::cli::ShArgs;
use crate::client::{Client, send};
use anyhow::Context as _;
use corral_api::command::PtyMessage;
use futures_util::{SinkExt as _, StreamExt as _};
use reqwest::header;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{Read as _, Write as _};
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::protocol::{Message, Role};

/// End of transmission: what a terminal sends for the end of input.
const EOT: u8 = 4;

/// The terminal in raw mode; as it was when dropped.
struct Raw(Option<Termios>);

impl Raw {
    fn enter() -> anyhow::Result<Self> {
        if !isatty(std::io::stdin()) {
            return Ok(Self(None));
        }
        let before = tcgetattr(std::io::stdin()).context("cannot read the terminal's settings")?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Flush, &raw).context("cannot set the terminal")?;
        Ok(Self(Some(before)))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // The terminal is gone if this fails.
            tcsetattr(std::io::stdin(), OptionalActions::Drain, before).ok();
        }
    }
}

fn window() -> Option<(u16, u16)> {
    let size = tcgetwinsize(std::io::stdout()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then_some((size.ws_col, size.ws_row))
}

/// `corral sh`.
pub async fn run(client: &Client, args: &ShArgs) -> anyhow::Result<ExitCode> {
    let mut query: Vec<(&str, String)> = args.argv.iter().map(|arg| ("argv", arg.clone())).collect();
    query.extend(args.cwd.iter().map(|cwd| ("cwd", cwd.clone())));
    query.extend(args.user.iter().map(|user| ("user", user.clone())));
    query.extend(args.attach.iter().map(|command| ("command_id", command.clone())));
    if let Some((cols, rows)) = window() {
        query.extend([("cols", cols.to_string()), ("rows", rows.to_string())]);
    }
    let request = client
        .get(&["v1", "sandboxes", &args.id, "pty"])
        .query(&query)
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_VERSION, "13")
        .header(header::SEC_WEBSOCKET_KEY, generate_key());
    let response = send(request).await?;
    anyhow::ensure!(response.status().as_u16() == 101, "the server did not open a WebSocket");
    let upgraded = response.upgrade().await.context("the WebSocket could not be opened")?;
    let socket = WebSocketStream::from_raw_socket(upgraded, Role::Client, None).await;
    let raw = Raw::enter()?;
    let ended = converse(socket).await;
    drop(raw);
    let (command, code) = ended?;
    match (code, command) {
        (Some(code), _) => Ok(exit_code(code)),
        (None, Some(command)) => {
            anyhow::bail!("the connection broke off; come back with: corral sh {} --attach {command}", args.id)
        }
        (None, None) => anyhow::bail!("the connection broke off"),
    }
}

/// Copies between terminal and socket. Returns the command and, when it ended, its exit status.
async fn converse<S>(socket: WebSocketStream<S>) -> anyhow::Result<(Option<String>, Option<i32>)>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    let (mut sink, mut source) = socket.split();
    let mut typed = keyboard();
    let mut resized = signal(SignalKind::window_change()).context("cannot wait for signals")?;
    let mut command = None;
    loop {
        tokio::select! {
            message = source.next() => match message {
                Some(Ok(Message::Binary(bytes))) => {
                    let mut out = std::io::stdout().lock();
                    out.write_all(&bytes).and_then(|()| out.flush()).context("cannot write to the terminal")?;
                }
                Some(Ok(Message::Text(text))) => match serde_json::from_str(&text) {
                    Ok(PtyMessage::Started { command_id }) => command = Some(command_id.to_string()),
                    Ok(PtyMessage::Ended { exit_code, .. }) => return Ok((command, Some(exit_code))),
                    // Messages of a later version.
                    Ok(PtyMessage::Resize { .. }) | Err(_) => {}
                },
                Some(Ok(Message::Close(_)) | Err(_)) | None => return Ok((command, None)),
                Some(Ok(_)) => {}
            },
            bytes = typed.recv() => match bytes {
                Some(bytes) => {
                    if sink.send(Message::Binary(bytes.into())).await.is_err() {
                        return Ok((command, None));
                    }
                }
                None => {
                    // The end of a piped input; the channel stays closed.
                    if sink.send(Message::Binary(vec![EOT].into())).await.is_err() {
                        return Ok((command, None));
                    }
                    typed = never();
                }
            },
            _ = resized.recv() => if let Some((cols, rows)) = window() {
                let text = serde_json::to_string(&PtyMessage::Resize { cols, rows }).context("cannot write a message")?;
                if sink.send(Message::Text(text.into())).await.is_err() {
                    return Ok((command, None));
                }
            },
        }
    }
}

/// A channel that neither sends nor ends.
fn never() -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(1);
    std::mem::forget(sender);
    receiver
}

/// Reads standard input on a thread of its own: a read cannot be given up.
fn keyboard() -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(16);
    std::thread::spawn(move || {
        let mut buffer = [0u8; 8192];
        let mut input = std::io::stdin();
        while let Ok(count @ 1..) = input.read(&mut buffer) {
            if sender.blocking_send(buffer[..count].to_vec()).is_err() {
                break;
            }
        }
    });
    receiver
}
