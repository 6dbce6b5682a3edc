//! Names that need not be text.

use base64::Engine as _;

/// Text for people, and the bytes in Base64 beside it where they are not UTF-8.
pub fn readable(bytes: &[u8]) -> (String, Option<String>) {
    let raw = std::str::from_utf8(bytes).is_err().then(|| base64::engine::general_purpose::STANDARD.encode(bytes));
    (String::from_utf8_lossy(bytes).into_owned(), raw)
}

#[cfg(test)]
mod tests {
    #[test]
    fn bytes_come_where_text_would_lose_them() {
        assert_eq!(super::readable("/ü".as_bytes()), ("/ü".into(), None));
        assert_eq!(super::readable(b"/\xff"), ("/\u{fffd}".into(), Some("L/8=".into())));
    }
}
