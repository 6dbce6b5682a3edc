//! A TLS port tells a client that speaks plain HTTP what is wrong, instead of hanging up.

use axum_server::accept::Accept;
use std::io;
use std::pin::Pin;
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

/// How long a new connection may stay silent.
const FIRST_BYTE_LIMIT: Duration = Duration::from_secs(10);
/// First byte of a TLS handshake record: RFC 8446, section 5.1.
const HANDSHAKE: u8 = 22;
const ANSWER: &str = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/problem+json\r\nconnection: close\r\n";
const PROBLEM: &str = r#"{"status":400,"kind":"invalid_request","message":"this port speaks TLS: use https","retryable":false,"infra_failed":false}"#;

/// Looks at the first byte of a connection.
#[derive(Debug, Clone)]
pub struct OnlyTls<A>(pub A);

impl<A, S> Accept<TcpStream, S> for OnlyTls<A>
where
    A: Accept<TcpStream, S, Stream = TcpStream>,
    A::Future: Send + 'static,
    A::Service: Send,
{
    type Stream = TcpStream;
    type Service = A::Service;
    type Future = Pin<Box<dyn Future<Output = io::Result<(TcpStream, A::Service)>> + Send>>;

    fn accept(&self, stream: TcpStream, service: S) -> Self::Future {
        let accepted = self.0.accept(stream, service);
        Box::pin(async move {
            let (mut stream, service) = accepted.await?;
            let mut first = [0];
            let seen = tokio::time::timeout(FIRST_BYTE_LIMIT, stream.peek(&mut first)).await??;
            if seen == 0 || first[0] == HANDSHAKE {
                return Ok((stream, service));
            }
            refuse(&mut stream).await?;
            Err(io::Error::new(io::ErrorKind::InvalidData, "plain HTTP on a TLS port"))
        })
    }
}

async fn refuse(stream: &mut TcpStream) -> io::Result<()> {
    let answer = format!("{ANSWER}content-length: {}\r\n\r\n{PROBLEM}", PROBLEM.len());
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await?;
    // Closing with bytes unread resets the connection, which may take the answer with it.
    let mut rest = vec![0; 4096];
    let drained = async {
        while tokio::io::AsyncReadExt::read(stream, &mut rest).await? > 0 {}
        Ok(())
    };
    tokio::time::timeout(Duration::from_secs(1), drained).await.unwrap_or(Ok(()))
}
