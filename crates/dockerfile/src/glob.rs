//! Patterns as Go's `filepath.Match` and Docker's `.dockerignore` mean them, through `globset`.

use globset::{GlobBuilder, GlobMatcher};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// Whether a text has signs that make it a pattern.
pub fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?', '[', '\\'])
}

/// A path, which is bytes, as matchers take it.
pub fn path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// A pattern. `*` and `?` stay within a name where `within_names`; `**` as a whole name matches any number of names
/// where `deep`.
pub fn compile(pattern: &str, within_names: bool, deep: bool) -> Result<GlobMatcher, String> {
    let mut text = String::with_capacity(pattern.len());
    let mut chars = pattern.chars().peekable();
    let mut in_class = false;
    while let Some(c) = chars.next() {
        match c {
            '\\' => {
                text.push('\\');
                text.extend(chars.next());
            }
            // globset's alternatives, which mean nothing here.
            '{' | '}' | ',' if !in_class => text.extend(['[', c, ']']),
            '*' if !deep && !in_class => {
                while chars.peek() == Some(&'*') {
                    chars.next();
                }
                text.push('*');
            }
            '[' if !in_class => {
                in_class = true;
                text.push('[');
                if chars.peek() == Some(&'^') {
                    chars.next();
                    text.push('!');
                }
            }
            ']' => {
                in_class = false;
                text.push(']');
            }
            other => text.push(other),
        }
    }
    let mut builder = GlobBuilder::new(&text);
    let glob = builder.literal_separator(within_names).backslash_escape(true).build();
    glob.map(|g| g.compile_matcher()).map_err(|e| e.kind().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, text: &str) -> bool {
        compile(pattern, true, false).unwrap().is_match(text)
    }

    #[test]
    fn as_go_matches() {
        for (pattern, text, yes) in [
            ("*.txt", "a.txt", true),
            ("*.txt", "d/a.txt", false),
            ("d/*", "d/a", true),
            ("d/*", "d/e/a", false),
            ("**", "d/a", false),
            ("a?c", "abc", true),
            ("a?c", "a/c", false),
            ("[a-c]x", "bx", true),
            ("[^a-c]x", "bx", false),
            ("[^a-c]x", "dx", true),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("{a,b}", "a", false),
            ("{a,b}", "{a,b}", true),
            ("x.*", "x.", true),
        ] {
            assert_eq!(matches(pattern, text), yes, "{pattern} {text}");
        }
        assert!(compile("[a", true, false).is_err());
        assert!(compile("a**/b", true, true).unwrap().is_match("ax/b"));
        assert!(compile("**/b", true, true).unwrap().is_match("b"));
    }
}
