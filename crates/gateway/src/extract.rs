//! Extractors whose refusals are problem documents, and that say where in the body or query the fault is.

use crate::refusal::Refusal;
use crate::state::{Caller, Gw};
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, RawPathParams, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse as _, Response};
use corral_api::problem::ErrorKind;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::marker::PhantomData;

/// A JSON body of type `T`.
#[derive(Debug)]
pub struct Json<T>(pub T);

/// A request whose JSON body was found to be a `T`, to be forwarded as it came.
#[derive(Debug)]
pub struct Checked<T> {
    /// What the body says.
    pub body: T,
    /// The request, body included.
    pub request: Request,
}

/// Query parameters of type `T`.
#[derive(Debug)]
pub struct Parameters<T>(pub T);

/// Says that the query parameters are a `T`, where they are forwarded as they came.
#[derive(Debug)]
pub struct Valid<T>(PhantomData<T>);

/// The one parameter of the path, decoded.
#[derive(Debug)]
pub struct Name(pub String);

/// A JSON answer.
///
/// # Errors
/// The value cannot be written as JSON.
pub fn json<T: Serialize>(status: u16, value: &T) -> Result<Response, Refusal> {
    let text = serde_json::to_vec(value).map_err(|error| Refusal::internal("writing the answer", &error))?;
    let status = axum::http::StatusCode::from_u16(status).unwrap_or_default();
    Ok((status, [(header::CONTENT_TYPE, "application/json")], text).into_response())
}

fn check_content_type(headers: &HeaderMap) -> Result<(), Refusal> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let shown: String = given.chars().take(80).collect();
    Err(Refusal::new(
        ErrorKind::UnsupportedMediaType,
        format!("content-type {shown:?}: this route takes application/json"),
    ))
}

/// Reads a JSON document and names the field that is wrong.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Refusal> {
    // serde takes a list for a structure, field by field: no such body is meant.
    if bytes.trim_ascii_start().first() == Some(&b'[') {
        return Err(Refusal::invalid("body: a list where an object was expected"));
    }
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        if path == "." {
            Refusal::invalid(format!("body: {inner}"))
        } else {
            Refusal::invalid(format!("body, at {path}: {inner}"))
        }
    })?;
    reader.end().map_err(|error| Refusal::invalid(format!("body: {error}")))?;
    Ok(value)
}

async fn read(request: Request, gw: &Gw) -> Result<(Parts, Bytes), Refusal> {
    check_content_type(request.headers())?;
    let (parts, body) = request.into_parts();
    let limit = gw.config.json_limit_bytes;
    let too_large = || Refusal::new(ErrorKind::TooLarge, format!("the JSON body is larger than {limit} bytes"));
    let declared = parts.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|length| length > limit as u64) {
        return Err(too_large());
    }
    match http_body_util::BodyExt::collect(http_body_util::Limited::new(body, limit)).await {
        Ok(collected) => Ok((parts, collected.to_bytes())),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => Err(too_large()),
        Err(error) => Err(Refusal::invalid(format!("the body could not be read: {error}"))),
    }
}

impl<T: DeserializeOwned> FromRequest<Gw> for Json<T> {
    type Rejection = Refusal;
    async fn from_request(request: Request, gw: &Gw) -> Result<Self, Refusal> {
        let (_, bytes) = read(request, gw).await?;
        Ok(Self(parse(&bytes)?))
    }
}

impl<T: DeserializeOwned> FromRequest<Gw> for Checked<T> {
    type Rejection = Refusal;
    async fn from_request(request: Request, gw: &Gw) -> Result<Self, Refusal> {
        let (mut parts, bytes) = read(request, gw).await?;
        let body = parse(&bytes)?;
        // The length is that of the bytes, also when they came in chunks.
        parts.headers.remove(header::TRANSFER_ENCODING);
        parts.headers.insert(header::CONTENT_LENGTH, bytes.len().into());
        Ok(Self { body, request: Request::from_parts(parts, Body::from(bytes)) })
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

fn query<T: DeserializeOwned>(parts: &Parts) -> Result<T, Refusal> {
    // Decoded without this, other bytes would become question marks, and name another file.
    let text = parts.uri.query().unwrap_or_default();
    if percent_encoding::percent_decode_str(text).decode_utf8().is_err() {
        return Err(Refusal::invalid("query: a value is not UTF-8; files of such names go through tar or a command"));
    }
    axum::extract::Query::<T>::try_from_uri(&parts.uri)
        .map(|query| query.0)
        .map_err(|error| Refusal::invalid(format!("query: {}", innermost(&error))))
}

impl<T: DeserializeOwned> FromRequestParts<Gw> for Parameters<T> {
    type Rejection = Refusal;
    async fn from_request_parts(parts: &mut Parts, _: &Gw) -> Result<Self, Refusal> {
        Ok(Self(query(parts)?))
    }
}

impl<T: DeserializeOwned> FromRequestParts<Gw> for Valid<T> {
    type Rejection = Refusal;
    async fn from_request_parts(parts: &mut Parts, _: &Gw) -> Result<Self, Refusal> {
        query::<T>(parts)?;
        Ok(Self(PhantomData))
    }
}

impl FromRequestParts<Gw> for Name {
    type Rejection = Refusal;
    async fn from_request_parts(parts: &mut Parts, gw: &Gw) -> Result<Self, Refusal> {
        let params = RawPathParams::from_request_parts(parts, gw)
            .await
            .map_err(|error| Refusal::invalid(format!("path: {error}")))?;
        let name = params.iter().next().map(|(_, value)| value.to_owned());
        name.map(Self).ok_or_else(|| Refusal::invalid("the path has no name"))
    }
}

impl FromRequestParts<Gw> for Caller {
    type Rejection = Refusal;
    async fn from_request_parts(parts: &mut Parts, _: &Gw) -> Result<Self, Refusal> {
        let unauthorized = || Refusal::new(ErrorKind::Unauthorized, "an API key is needed");
        parts.extensions.get::<Self>().cloned().ok_or_else(unauthorized)
    }
}
