//! Errors as callers see them: RFC 9457 problem documents with a stable `kind`.

use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $status:literal, $retryable:literal;)*) => {
        /// What kind of error it is. Each kind has one HTTP status and says whether the same request may succeed later.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum ErrorKind { $($(#[$doc])* $name,)* }
        impl ErrorKind {
            /// Every kind, for documents and tests.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];
            /// The stable text used on the wire.
            pub const fn as_str(self) -> &'static str { match self { $(Self::$name => $text),* } }
            /// The HTTP status this kind maps to.
            pub const fn status(self) -> u16 { match self { $(Self::$name => $status),* } }
            /// Whether the same request may succeed later.
            pub const fn is_retryable(self) -> bool { match self { $(Self::$name => $retryable),* } }
        }
    };
}

kinds! {
    /// The request is malformed or names something impossible.
    InvalidRequest = "invalid_request", 400, false;
    /// No or unknown API key.
    Unauthorized = "unauthorized", 401, false;
    /// The key may not do this.
    Forbidden = "forbidden", 403, false;
    /// No such sandbox, command, image, layer, environment, file or route.
    NotFound = "not_found", 404, false;
    /// The route exists, but not with this method; `Allow` names those it has.
    MethodNotAllowed = "method_not_allowed", 405, false;
    /// The thing exists in another state or form than the request supposes.
    Conflict = "conflict", 409, false;
    /// The same idempotency or step key was used with another body.
    IdempotencyMismatch = "idempotency_mismatch", 409, false;
    /// The sandbox has ended; `end_reason` in its record says why.
    SandboxEnded = "sandbox_ended", 410, false;
    /// A body, header, argument list or file is larger than allowed.
    TooLarge = "too_large", 413, false;
    /// The body is of another media type than the route takes.
    UnsupportedMediaType = "unsupported_media_type", 415, false;
    /// The byte range lies outside the file or log.
    RangeNotSatisfiable = "range_not_satisfiable", 416, false;
    /// Archive, manifest or configuration that cannot be accepted.
    InvalidImage = "invalid_image", 422, false;
    /// A step of a build failed.
    BuildFailed = "build_failed", 422, false;
    /// Content does not have the digest it was named by.
    DigestMismatch = "digest_mismatch", 422, false;
    /// Permission refused inside the sandbox.
    PermissionDenied = "permission_denied", 403, false;
    /// The path is a directory, or is none, where the other is needed.
    WrongFileType = "wrong_file_type", 409, false;
    /// Somebody inside the sandbox holds the file for now (a lease).
    FileBusy = "file_busy", 409, true;
    /// The sandbox's disk quota is used up.
    DiskFull = "disk_full", 507, false;
    /// The sandbox could not be given the memory or processes an operation needs.
    LimitExceeded = "limit_exceeded", 409, false;
    /// No such user inside the sandbox.
    UnknownUser = "unknown_user", 400, false;
    /// The command could not be started: missing or not executable, or a bad working directory.
    CommandNotStarted = "command_not_started", 422, false;
    /// Admission refused: the node is full for now.
    Overloaded = "overloaded", 429, true;
    /// The node's host has too little disk or memory to take more.
    InsufficientStorage = "insufficient_storage", 507, true;
    /// The service is starting, draining or has lost a part it needs.
    Unavailable = "unavailable", 503, true;
    /// The outcome cannot be known after a crash; it is never tried again by the platform.
    OutcomeUnknown = "outcome_unknown", 500, false;
    /// A layer or log could not be read or written on the host.
    StorageError = "storage_error", 500, true;
    /// This node cannot do it: kernel feature or backend is missing.
    Unsupported = "unsupported", 501, false;
    /// A fault of the platform.
    Internal = "internal", 500, false;
    /// A remote (registry, node) failed or answered nonsense.
    UpstreamFailed = "upstream_failed", 502, true;
    /// The operation took longer than its limit.
    Timeout = "timeout", 504, true;
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An RFC 9457 problem document (`application/problem+json`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// `urn:corral:problem:<kind>`.
    #[serde(rename = "type")]
    pub type_uri: String,
    /// Short title: the kind in words.
    pub title: String,
    /// HTTP status.
    pub status: u16,
    /// The stable kind.
    pub kind: ErrorKind,
    /// What happened and what to do, for a person.
    pub message: String,
    /// Whether the same request may succeed later.
    pub retryable: bool,
    /// Whether the platform, not the caller or the agent, is at fault.
    pub infra_failed: bool,
    /// How long to wait before the next try.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// The sandbox concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    /// Id of the request, as in the `x-request-id` header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
}

impl Problem {
    /// A problem of this kind with a message for the caller.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let status = kind.status();
        Self {
            type_uri: format!("urn:corral:problem:{kind}"),
            title: kind.as_str().replace('_', " "),
            status,
            kind,
            message: message.into(),
            retryable: kind.is_retryable(),
            infra_failed: status >= 500 && !matches!(kind, ErrorKind::DiskFull | ErrorKind::Unsupported),
            retry_after_ms: None,
            sandbox_id: None,
            request_id: None,
        }
    }

    /// Sets how long to wait before the next try.
    #[must_use]
    pub fn retry_after_ms(mut self, ms: u64) -> Self {
        self.retry_after_ms = Some(ms);
        self
    }

    /// Names the sandbox concerned.
    #[must_use]
    pub fn sandbox(mut self, id: impl fmt::Display) -> Self {
        self.sandbox_id = Some(id.to_string());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_distinct_names_that_match_serde() {
        let mut seen = std::collections::BTreeSet::new();
        for kind in ErrorKind::ALL {
            assert!(seen.insert(kind.as_str()));
            assert_eq!(serde_json::to_string(kind).unwrap(), format!("\"{kind}\""));
            assert!((400..600).contains(&kind.status()));
        }
    }
}
