//! An answer that comes before its request was read to the end: what its client still sends is taken in for a while.
//! Otherwise the connection would close under it, and most clients tell of that instead of the answer.

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt as _;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

/// How long a client may go on sending what nobody reads.
const LONGEST: Duration = Duration::from_secs(10);

/// The outermost layer of the router.
pub async fn linger(request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let request = request.map(|body| Shared(Arc::new(Mutex::new(body))));
    let mut rest = request.body().clone();
    let response = next.run(request.map(Body::new)).await;
    let is_refusal = response.status().is_client_error() || response.status().is_server_error();
    if is_refusal && !rest.is_end_stream() {
        tokio::spawn(tokio::time::timeout(LONGEST, async move { while let Some(Ok(_)) = rest.frame().await {} }));
    }
    response
}

/// A request's body that may be read on after its handler has dropped it.
#[derive(Clone)]
struct Shared(Arc<Mutex<Body>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Body> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HttpBody for Shared {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut *self.lock()).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.lock().is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.lock().size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::http::StatusCode;
    use axum::routing::put;
    use std::io::{Read as _, Write as _};

    #[tokio::test(flavor = "multi_thread")]
    async fn a_refusal_is_read_by_a_client_that_goes_on_sending() {
        let refuse = || async { (StatusCode::BAD_REQUEST, "no such thing") };
        let routes = Router::new().route("/", put(refuse)).layer(axum::middleware::from_fn(linger));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move { axum::serve(listener, routes).await });
        let sent = tokio::task::spawn_blocking(move || {
            let mut client = std::net::TcpStream::connect(address).unwrap();
            client.write_all(b"PUT / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 33554432\r\n\r\n")?;
            for _ in 0..512 {
                client.write_all(&[0; 65536])?;
            }
            let mut answer = String::new();
            client.read_to_string(&mut answer).map(|_| answer)
        });
        let answer = sent.await.unwrap().unwrap();
        serving.abort();
        assert!(answer.starts_with("HTTP/1.1 400") && answer.ends_with("no such thing"), "{answer}");
    }
}
