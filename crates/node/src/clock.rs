//! Times as the node keeps them: milliseconds since 1970, written as RFC 3339 for callers.

/// Now.
pub fn now_ms() -> u64 {
    u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or(0)
}

/// As callers see it.
pub fn rfc3339(ms: u64) -> String {
    jiff::Timestamp::from_millisecond(i64::try_from(ms).unwrap_or(i64::MAX)).unwrap_or_default().to_string()
}
