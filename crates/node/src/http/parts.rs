//! What all routes use: answers, problems, and the sandbox and command a path names.

use crate::commands::Command;
use crate::ledger::CommandRecord;
use crate::node::Core;
use crate::sandbox::Sandbox;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::{HeaderValue, StatusCode, header, request};
use axum::response::{IntoResponse, Response};
use corral_api::ids::{CommandId, SandboxId};
use corral_api::problem::{ErrorKind, Problem};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::sync::Arc;

/// An answer, or a problem document.
pub type Answer<T = Response> = Result<T, Fail>;

/// A problem as an answer.
#[derive(Debug, Clone)]
pub struct Fail(Box<Problem>);

impl From<Problem> for Fail {
    fn from(problem: Problem) -> Self {
        Self(Box::new(problem))
    }
}

impl From<corral_runtime::RuntimeError> for Fail {
    fn from(error: corral_runtime::RuntimeError) -> Self {
        crate::error::runtime_problem(&error).into()
    }
}

impl IntoResponse for Fail {
    fn into_response(self) -> Response {
        let mut response = render(&self.0);
        // For `name_request`, which knows the request's id.
        response.extensions_mut().insert(self);
        response
    }
}

fn render(problem: &Problem) -> Response {
    let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, json_bytes(problem)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    if let Some(ms) = problem.retry_after_ms {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1000).max(1)));
    }
    response
}

/// Puts the request's id, which the gateway gave it, into its problem document.
pub async fn name_request(request: Request, next: axum::middleware::Next) -> Response {
    let id = request.headers().get("x-request-id").and_then(|v| v.to_str().ok()).map(str::to_owned);
    let mut response = next.run(request).await;
    if let Some(fail) = response.extensions_mut().remove::<Fail>() {
        let mut problem = *fail.0;
        problem.request_id = id;
        // The headers stay, but for the length of the body.
        response.headers_mut().remove(header::CONTENT_LENGTH);
        *response.body_mut() = axum::body::Body::from(json_bytes(&problem));
    }
    response
}

fn json_bytes<T: Serialize>(value: &T) -> Vec<u8> {
    // The wire types have string keys only: writing them does not fail.
    serde_json::to_vec(value).unwrap_or_default()
}

/// A JSON answer.
pub fn json<T: Serialize>(status: StatusCode, value: &T) -> Answer {
    Ok((status, [(header::CONTENT_TYPE, "application/json")], json_bytes(value)).into_response())
}

/// A bad request.
pub fn invalid(text: impl Into<String>) -> Fail {
    Problem::new(ErrorKind::InvalidRequest, text).into()
}

/// A JSON body; anything wrong with it is a problem document.
#[derive(Debug)]
pub struct Body<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Fail;

    async fn from_request(request: Request, state: &S) -> Result<Self, Fail> {
        let bytes = Bytes::from_request(request, state).await.map_err(|rejection| {
            let kind = match rejection {
                BytesRejection::FailedToBufferBody(ref e) if e.status() == StatusCode::PAYLOAD_TOO_LARGE => {
                    ErrorKind::TooLarge
                }
                _ => ErrorKind::InvalidRequest,
            };
            Problem::new(kind, rejection.body_text())
        })?;
        // serde takes a list for a structure, field by field.
        if bytes.trim_ascii_start().first() == Some(&b'[') {
            return Err(invalid("the body is a list where an object was expected"));
        }
        serde_json::from_slice(&bytes).map(Self).map_err(|e| invalid(format!("the body is not as expected: {e}")))
    }
}

/// Takes what is left of a body that nobody wants, so that its sender gets to read the answer. One that is very long is
/// broken off.
pub async fn drain(body: &mut axum::body::BodyDataStream) {
    use futures_util::StreamExt as _;
    const MOST: usize = 256 << 20;
    let mut taken = 0;
    while let Some(Ok(piece)) = body.next().await {
        taken += piece.len();
        if taken > MOST {
            return;
        }
    }
}

/// The last of an error's sources: those around it repeat its text.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

/// Query parameters; anything wrong with them is a problem document.
#[derive(Debug)]
pub struct Params<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = Fail;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, Fail> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(value)) => Ok(Self(value)),
            Err(rejection) => Err(invalid(format!("query: {}", innermost(&rejection)))),
        }
    }
}

async fn path_part<S: Send + Sync>(parts: &mut request::Parts, state: &S, name: &str) -> Result<String, Fail> {
    let Path(mut all) =
        Path::<HashMap<String, String>>::from_request_parts(parts, state).await.map_err(|e| invalid(e.body_text()))?;
    all.remove(name).ok_or_else(|| invalid(format!("the path names no {name}")))
}

/// The id of the sandbox a path names.
#[derive(Debug)]
pub struct Named(pub SandboxId);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Fail;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, Fail> {
        let text = path_part(parts, state, "id").await?;
        let id = text.parse().map_err(|_| {
            let shown: String = text.chars().take(80).collect();
            Problem::new(ErrorKind::NotFound, format!("no sandbox {shown:?}"))
        })?;
        Ok(Self(id))
    }
}

/// The live sandbox a path names.
#[derive(Debug)]
pub struct Live(pub Arc<Sandbox>);

impl FromRequestParts<Arc<Core>> for Live {
    type Rejection = Fail;

    async fn from_request_parts(parts: &mut request::Parts, core: &Arc<Core>) -> Result<Self, Fail> {
        let Named(id) = Named::from_request_parts(parts, core).await?;
        Ok(Self(core.find(&id).await?))
    }
}

/// The command a path names, of a live or ended sandbox.
#[derive(Debug)]
pub struct OfCommand {
    /// Its record now.
    pub record: CommandRecord,
    /// The command and its sandbox, while that is live.
    pub live: Option<(Arc<Sandbox>, Arc<Command>)>,
}

impl FromRequestParts<Arc<Core>> for OfCommand {
    type Rejection = Fail;

    async fn from_request_parts(parts: &mut request::Parts, core: &Arc<Core>) -> Result<Self, Fail> {
        let Named(id) = Named::from_request_parts(parts, core).await?;
        let text = path_part(parts, core, "command_id").await?;
        let missing = || {
            let shown: String = text.chars().take(80).collect();
            Problem::new(ErrorKind::NotFound, format!("no command {shown:?} in sandbox {id}")).sandbox(&id)
        };
        let command_id: CommandId = text.parse().map_err(|_| missing())?;
        if let Some(sandbox) = core.live(&id) {
            let command = sandbox.command(&command_id).ok_or_else(missing)?;
            let record = command.lock().clone();
            return Ok(Self { record, live: Some((sandbox, command)) });
        }
        if core.ended(&id).await?.is_none() {
            return Err(Problem::new(ErrorKind::NotFound, format!("no sandbox {id}")).sandbox(&id).into());
        }
        let (of, wanted) = (id.clone(), command_id.clone());
        let record = core.read_ledger(move |ledger| ledger.command(&of, &wanted)).await?.ok_or_else(missing)?;
        Ok(Self { record, live: None })
    }
}

/// Lines of JSON from a channel of values.
pub fn ndjson<T: Serialize + Send + 'static>(receiver: tokio::sync::mpsc::Receiver<T>) -> Response {
    let lines = futures_util::stream::unfold(receiver, async |mut receiver| {
        let value = receiver.recv().await?;
        let mut line = json_bytes(&value);
        line.push(b'\n');
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(line)), receiver))
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], axum::body::Body::from_stream(lines)).into_response()
}
