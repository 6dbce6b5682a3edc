//! What a handler answers when it does not do what was asked: a problem document for the caller and, apart from it,
//! a detail for the operator's log. The edge adds the request id and writes the body.

use crate::catalogue::CatalogueError;
use crate::node_channel::NodeError;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use corral_api::problem::{ErrorKind, Problem};
use std::error::Error;

/// Media type of problem documents (RFC 9457).
pub const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");

/// A refused request.
#[derive(Debug, Clone)]
pub struct Refusal {
    /// What the caller sees.
    pub problem: Box<Problem>,
    /// What the operator's log holds beside it.
    pub detail: Option<String>,
}

/// What handlers return.
pub type Answer = Result<Response, Refusal>;

impl Refusal {
    /// A refusal the caller can act on.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Problem::new(kind, message).into()
    }

    /// A request that cannot be understood or honoured.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidRequest, message)
    }

    /// A fault of the gateway: the cause goes to the log only.
    pub fn internal(doing: &str, source: &dyn Error) -> Self {
        let mut refusal = Self::new(ErrorKind::Internal, format!("{doing} failed in the gateway"));
        refusal.detail = Some(chain(source));
        refusal
    }

    /// Adds the wait before the next try.
    #[must_use]
    pub fn retry_after_ms(mut self, ms: u64) -> Self {
        self.problem.retry_after_ms = Some(ms);
        self
    }
}

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        Self { problem: Box::new(problem), detail: None }
    }
}

/// An error with all its sources.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text.push_str(": ");
        text.push_str(&source.to_string());
        next = source.source();
    }
    text
}

impl IntoResponse for Refusal {
    /// A response without a body that carries the refusal as an extension; [`crate::edge`] completes it.
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = status.into_response();
        if let Some(ms) = self.problem.retry_after_ms {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1000)));
        }
        if self.problem.status == 401 {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

impl From<CatalogueError> for Refusal {
    fn from(error: CatalogueError) -> Self {
        match error.kind() {
            ErrorKind::Internal => Self::internal("a look-up in the catalogue", &error),
            kind => Self::new(kind, error.to_string()),
        }
    }
}

impl From<NodeError> for Refusal {
    fn from(error: NodeError) -> Self {
        let mut refusal = Self::new(error.kind(), error.to_string());
        refusal.detail = Some(chain(&error));
        if error.is_retryable() { refusal.retry_after_ms(1000) } else { refusal }
    }
}
