//! Names of objects: safe as paths of files and as keys of S3 alike.

use crate::error::{KeyFault, StoreError};
use std::fmt;
use std::str::FromStr;

/// Longest key: what S3 allows (1,024) less a generous prefix.
pub const MAX_KEY_BYTES: usize = 512;
/// Longest segment: below what file systems allow for a name (255).
pub const MAX_SEGMENT_BYTES: usize = 200;
/// Most segments, so that walks of a directory store are bounded.
pub const MAX_SEGMENTS: usize = 16;

/// The name of an object: segments of `a-z 0-9 . _ -` divided by slashes, each beginning with a letter or digit.
///
/// Nothing that begins with a dot is a key, so `..` cannot occur, and stores keep what is theirs below such names. No
/// key should lie below another (`a` and `a/b`): a directory store cannot hold both.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(String);

impl Key {
    /// A key of a text.
    ///
    /// # Errors
    /// The text is no key; the error says why.
    pub fn parse(text: impl Into<String>) -> Result<Self, StoreError> {
        let text = text.into();
        match check(&text) {
            Ok(()) => Ok(Self(text)),
            Err(fault) => Err(StoreError::InvalidKey { key: text.chars().take(80).collect(), fault }),
        }
    }

    /// The key as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What lies between the slashes.
    pub fn segments(&self) -> impl Iterator<Item = &str> {
        self.0.split('/')
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Key {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        Self::parse(text)
    }
}

fn check(text: &str) -> Result<(), KeyFault> {
    if text.is_empty() {
        return Err(KeyFault::Empty);
    }
    if text.len() > MAX_KEY_BYTES {
        return Err(KeyFault::Long);
    }
    if text.split('/').count() > MAX_SEGMENTS {
        return Err(KeyFault::Deep);
    }
    text.split('/').try_for_each(check_segment)
}

/// Whether this may stand between two slashes of a key.
pub(crate) fn check_segment(segment: &str) -> Result<(), KeyFault> {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let Some(first) = segment.bytes().next() else { return Err(KeyFault::EmptySegment) };
    if segment.len() > MAX_SEGMENT_BYTES {
        return Err(KeyFault::LongSegment);
    }
    if !segment.bytes().all(|b| plain(b) || matches!(b, b'.' | b'_' | b'-')) {
        return Err(KeyFault::Character);
    }
    if !plain(first) {
        return Err(KeyFault::Start);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn says_what_is_wrong() {
        for (text, fault) in [
            ("", KeyFault::Empty),
            ("/a", KeyFault::EmptySegment),
            ("a/", KeyFault::EmptySegment),
            ("a//b", KeyFault::EmptySegment),
            ("..", KeyFault::Start),
            ("a/../b", KeyFault::Start),
            (".tmp/x", KeyFault::Start),
            ("-rf", KeyFault::Start),
            ("A", KeyFault::Character),
            ("a b", KeyFault::Character),
            ("a\0", KeyFault::Character),
            ("ä", KeyFault::Character),
        ] {
            assert_eq!(check(text), Err(fault), "{text:?}");
        }
        assert_eq!(check(&"a".repeat(201)), Err(KeyFault::LongSegment));
        assert_eq!(check(&"a".repeat(513)), Err(KeyFault::Long));
        assert_eq!(check(&["a"; 17].join("/")), Err(KeyFault::Deep));
        assert_eq!(check("layers/sha256-0a/index.v1_x"), Ok(()));
    }

    proptest! {
        #[test]
        fn takes_what_is_described(text in "[a-z0-9][a-z0-9._-]{0,30}(/[a-z0-9][a-z0-9._-]{0,30}){0,9}") {
            let key = Key::parse(text.clone()).expect("a key");
            prop_assert_eq!(key.as_str(), text);
        }

        #[test]
        fn stays_below_the_root(text in "[a-zA-Z0-9./_ \\\\%-]{0,40}|\\PC{0,40}") {
            if let Ok(key) = Key::parse(text) {
                let path = std::path::Path::new(key.as_str());
                prop_assert!(path.components().all(|c| matches!(c, std::path::Component::Normal(_))));
                prop_assert_eq!(path.components().count(), key.segments().count());
                prop_assert!(key.segments().all(|s| !s.starts_with('.')));
                let path = object_store::path::Path::parse(key.as_str()).expect("a path");
                prop_assert_eq!(path.as_ref(), key.as_str());
            }
        }
    }
}
