//! What the errors of a service mean.

use crate::error::{ErrorKind, StoreError};
use http::StatusCode;
use object_store::client::{HttpError, HttpErrorKind};

/// Longest message of a service that is passed on.
const MESSAGE_BYTES: usize = 300;

/// The error of a call, without what a service repeats of the request.
pub(super) fn meaning(
    op: &'static str,
    key: &str,
    error: &object_store::Error,
    status: Option<StatusCode>,
) -> StoreError {
    tracing::debug!(op, key, %error, "a call of the service failed");
    let text = error.to_string();
    let code = element(&text, "Code");
    if code == Some("NoSuchBucket") {
        return StoreError::config(format!("{op} {key}: the bucket does not exist"));
    }
    // The transport first: a status may be that of an earlier try.
    if let Some(kind) = transport(error) {
        let kind_text = if kind == ErrorKind::Timeout { "no answer in time" } else { "cannot be reached" };
        return StoreError::Service {
            op,
            key: key.to_owned(),
            kind,
            status: None,
            text: format!("the service {kind_text}: {}", root_cause(error)),
        };
    }
    let kind = match (status, code) {
        (Some(StatusCode::NOT_FOUND), _) if code.is_none_or(|code| matches!(code, "NoSuchKey" | "NotFound")) => {
            return StoreError::NotFound { key: key.to_owned() };
        }
        (Some(StatusCode::RANGE_NOT_SATISFIABLE), _) => ErrorKind::Corrupt,
        (_, Some("NotImplemented" | "MethodNotAllowed")) => ErrorKind::Unsupported,
        (_, Some("QuotaExceeded" | "InsufficientStorage" | "XMinioStorageFull")) => ErrorKind::Full,
        (
            _,
            Some("InvalidAccessKeyId" | "SignatureDoesNotMatch" | "ExpiredToken" | "InvalidToken" | "AccessDenied"),
        ) => ErrorKind::Denied,
        (_, Some("RequestTimeout")) => ErrorKind::Unavailable,
        (Some(status), _) => of_status(status),
        // No refusal and no failure of the connection: the answer itself is not what was asked for.
        (None, _) => ErrorKind::Corrupt,
    };
    let text = said(&text, code, status);
    StoreError::Service { op, key: key.to_owned(), kind, status: status.map(|s| s.as_u16()), text }
}

/// Whether a creating call was refused because of what is there.
pub(super) fn is_taken(error: &StoreError) -> bool {
    matches!(error, StoreError::Service { status: Some(409 | 412), .. })
}

fn of_status(status: StatusCode) -> ErrorKind {
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ErrorKind::Denied,
        StatusCode::NOT_IMPLEMENTED | StatusCode::METHOD_NOT_ALLOWED => ErrorKind::Unsupported,
        StatusCode::INSUFFICIENT_STORAGE => ErrorKind::Full,
        // Someone else is writing: a look or another try settles it.
        StatusCode::CONFLICT | StatusCode::PRECONDITION_FAILED => ErrorKind::Unavailable,
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => ErrorKind::Unavailable,
        status if status.is_server_error() => ErrorKind::Unavailable,
        _ => ErrorKind::Invalid,
    }
}

fn transport(error: &object_store::Error) -> Option<ErrorKind> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = next {
        if let Some(http) = current.downcast_ref::<HttpError>() {
            return Some(match http.kind() {
                HttpErrorKind::Timeout => ErrorKind::Timeout,
                HttpErrorKind::Decode => ErrorKind::Corrupt,
                _ => ErrorKind::Unavailable,
            });
        }
        next = current.source();
    }
    None
}

fn root_cause(error: &object_store::Error) -> String {
    let mut current: &(dyn std::error::Error + 'static) = error;
    while let Some(next) = current.source() {
        current = next;
    }
    cut(&current.to_string())
}

/// Status, code and message, which name no secrets. The rest of a service's answer repeats what was sent.
fn said(text: &str, code: Option<&str>, status: Option<StatusCode>) -> String {
    let mut parts = Vec::new();
    if let Some(status) = status {
        parts.push(status.as_str().to_owned());
    }
    match (code, element(text, "Message")) {
        (Some(code), Some(message)) => parts.push(format!("{code}: {}", cut(message))),
        (Some(code), None) => parts.push(code.to_owned()),
        (None, _) if status.is_some_and(|s| s.is_redirection()) => {
            parts.push("the service sends elsewhere: region or endpoint are wrong".to_owned());
        }
        (None, _) if status.is_none() => parts.push(cut(text)),
        (None, _) => parts.push("no reason given".to_owned()),
    }
    parts.join(" ")
}

/// The text of an element of an error document, which is small and flat.
fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>")).map(|(inside, _)| inside)
}

fn cut(text: &str) -> String {
    text.char_indices()
        .take_while(|(at, _)| *at < MESSAGE_BYTES)
        .map(|(_, c)| if c.is_control() { ' ' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(body: &str) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source: body.to_owned().into() }
    }

    #[test]
    fn tells_kinds_by_code_and_status() {
        let kind =
            |status: u16, body: &str| meaning("get", "k", &refusal(body), StatusCode::from_u16(status).ok()).kind();
        assert_eq!(kind(404, "<Error><Code>NoSuchKey</Code></Error>"), ErrorKind::NotFound);
        assert_eq!(kind(404, ""), ErrorKind::NotFound);
        assert_eq!(kind(404, "<Error><Code>NoSuchBucket</Code></Error>"), ErrorKind::Invalid);
        assert_eq!(kind(404, "<Error><Code>NoSuchUpload</Code></Error>"), ErrorKind::Invalid);
        assert_eq!(kind(403, ""), ErrorKind::Denied);
        assert_eq!(kind(400, "<Error><Code>ExpiredToken</Code></Error>"), ErrorKind::Denied);
        assert_eq!(kind(400, "<Error><Code>EntityTooSmall</Code></Error>"), ErrorKind::Invalid);
        assert_eq!(kind(503, "<Error><Code>SlowDown</Code></Error>"), ErrorKind::Unavailable);
        assert_eq!(kind(507, ""), ErrorKind::Full);
        assert_eq!(kind(501, "<Error><Code>NotImplemented</Code></Error>"), ErrorKind::Unsupported);
        assert_eq!(kind(416, ""), ErrorKind::Corrupt);
    }

    #[test]
    fn passes_on_no_more_than_code_and_message() {
        let body =
            "<Error><Code>SignatureDoesNotMatch</Code><Message>no</Message><StringToSign>secret</StringToSign></Error>";
        let error = meaning("put", "k", &refusal(body), Some(StatusCode::FORBIDDEN));
        assert_eq!(error.to_string(), "put k: 403 SignatureDoesNotMatch: no");
    }
}
