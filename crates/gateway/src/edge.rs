//! What every request passes first and every answer last: request id, size of the head, key, panics, problem
//! documents, metrics.

use crate::node_channel::API_KEY;
use crate::refusal::{PROBLEM_JSON, Refusal};
use crate::state::{Caller, Gw};
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use corral_api::problem::ErrorKind;
use futures_util::FutureExt as _;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

/// Header by which a request is found in logs.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The outermost layer of the router.
pub async fn edge(State(gw): State<Gw>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let in_flight = gw.metrics.begin();
    let id = request_id(request.headers());
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let matched = request.extensions().get::<MatchedPath>().cloned();
    let route = matched.as_ref().map_or("unmatched", MatchedPath::as_str);
    let method = request.method().clone();

    let handled = AssertUnwindSafe(admit_and_run(&gw, request, next)).catch_unwind().await;
    let mut response = handled.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message");
        let mut refusal = Refusal::new(ErrorKind::Internal, "the request failed in the gateway");
        refusal.detail = Some(format!("panic: {text}"));
        refusal.into_response()
    });
    if let Some(refusal) = response.extensions_mut().remove::<Refusal>() {
        response = complete(response, refusal, &id, route);
    }
    if is_endless(response.headers()) {
        // Event streams resume elsewhere: they do not hold a shutdown up.
        let stop = gw.stop.clone().cancelled_owned();
        response = response.map(|body| {
            Body::from_stream(futures_util::StreamExt::take_until(body.into_data_stream(), Box::pin(stop)))
        });
    }
    response.headers_mut().insert(REQUEST_ID, id);
    gw.metrics.answered(route, &method, response.status().as_u16(), started.elapsed());
    drop(in_flight);
    response
}

async fn admit_and_run(gw: &Gw, mut request: Request, next: Next) -> Response {
    match admit(gw, &mut request).await {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

async fn admit(gw: &Gw, request: &mut Request) -> Result<(), Refusal> {
    let limit = gw.config.head_limit_bytes;
    let uri = request.uri();
    let target = uri.path().len() + uri.query().map_or(0, str::len);
    let headers: usize = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    if target + headers > limit {
        let text = format!("path, query and headers are larger than {limit} bytes");
        return Err(Refusal::new(ErrorKind::TooLarge, text));
    }
    if !(uri.path() == "/v1" || uri.path().starts_with("/v1/")) {
        return Ok(());
    }
    let project_id = authenticate(gw, request.headers()).await.inspect_err(|refusal| {
        if refusal.problem.kind == ErrorKind::Unauthorized {
            gw.metrics.refused_key();
        }
    })?;
    request.extensions_mut().insert(Caller { project_id });
    Ok(())
}

async fn authenticate(gw: &Gw, headers: &HeaderMap) -> Result<Arc<str>, Refusal> {
    let unauthorized = |text: &str| Refusal::new(ErrorKind::Unauthorized, text);
    let key = presented_key(headers)
        .ok_or_else(|| unauthorized("no API key: send Authorization: Bearer KEY or X-API-Key: KEY"))?;
    let verified = match gw.catalogue.verified(key) {
        Some(verified) => Some(verified),
        None => {
            let key = key.to_owned();
            gw.catalogue(move |catalogue| catalogue.verify(&key)).await?
        }
    };
    Ok(verified.ok_or_else(|| unauthorized("the API key is not known"))?.project_id.as_str().into())
}

fn presented_key(headers: &HeaderMap) -> Option<&str> {
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
        return scheme.eq_ignore_ascii_case("bearer").then(|| key.trim());
    }
    headers.get(API_KEY)?.to_str().ok()
}

/// The caller's id of the request where it is fit for logs, else a fresh one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    let fine = |v: &&HeaderValue| {
        (1..=128).contains(&v.len()) && v.as_bytes().iter().all(|b| b.is_ascii_alphanumeric() || b"-_.:/".contains(b))
    };
    if let Some(given) = headers.get(REQUEST_ID).filter(fine) {
        return given.clone();
    }
    let mut raw = [0u8; 12];
    // Without randomness the id is merely not unique.
    let text = match getrandom::fill(&mut raw) {
        Ok(()) => format!("r{}", data_encoding::HEXLOWER.encode(&raw)),
        Err(_) => "r0".into(),
    };
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("r0"))
}

/// Writes the problem document and the operator's log line.
fn complete(response: Response, mut refusal: Refusal, id: &HeaderValue, route: &str) -> Response {
    let id = id.to_str().unwrap_or_default();
    if let Some(detail) = &refusal.detail {
        tracing::warn!(request_id = id, route, kind = %refusal.problem.kind, detail, "request failed");
    }
    refusal.problem.request_id = Some(id.to_owned());
    let (mut parts, _) = response.into_parts();
    let text = serde_json::to_vec(&refusal.problem).unwrap_or_default();
    parts.headers.insert(header::CONTENT_TYPE, PROBLEM_JSON);
    parts.headers.insert(header::CONTENT_LENGTH, text.len().into());
    Response::from_parts(parts, Body::from(text))
}

fn is_endless(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"))
}
