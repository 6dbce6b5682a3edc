//! WebSockets: the upgrade is forwarded to the node, then bytes are copied in both directions until one side ends.

use crate::node_channel::NodeChannel;
use crate::refusal::{Answer, Refusal};
use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use hyper_util::rt::TokioIo;
use tokio_util::sync::CancellationToken;

/// Bytes in flight in each direction of a tunnel.
const TUNNEL_BUFFER: usize = 32 << 10;

/// Forwards an upgrade request. The copying ends with either side, or when `stop` is cancelled.
pub async fn forward(channel: &NodeChannel, mut request: Request, stop: CancellationToken) -> Answer {
    let wants = request.headers().get(header::UPGRADE).and_then(|v| v.to_str().ok());
    if !wants.is_some_and(|v| v.eq_ignore_ascii_case("websocket")) {
        return Err(Refusal::invalid("this route speaks WebSocket: send an upgrade request"));
    }
    let client = hyper::upgrade::on(&mut request);
    let mut response = channel.send_as_is(request, true).await?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        return Ok(response);
    }
    let node = hyper::upgrade::on(&mut response);
    tokio::spawn(async move {
        let copy = async {
            let (client, node) = tokio::try_join!(client, node)?;
            let (mut client, mut node) = (TokioIo::new(client), TokioIo::new(node));
            match tokio::io::copy_bidirectional_with_sizes(&mut client, &mut node, TUNNEL_BUFFER, TUNNEL_BUFFER).await {
                Ok(bytes) => tracing::debug!(?bytes, "tunnel ended"),
                // Terminals are left by closing the window: a reset is an ordinary end.
                Err(error) => tracing::debug!(%error, "tunnel broke off"),
            }
            Ok::<_, hyper::Error>(())
        };
        tokio::select! {
            ended = copy => if let Err(error) = ended { tracing::debug!(%error, "upgrade failed") },
            () = stop.cancelled() => {}
        }
    });
    Ok(response.map(|_| Body::empty()))
}
