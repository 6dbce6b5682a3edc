//! `.dockerignore`: which files of a context take no part in the build.
//!
//! As Docker means it: patterns are rooted at the context, `**` matches any number of directories, what lies below an
//! excluded directory is excluded, `!` takes back, and the last pattern that matches decides.

use crate::copy::clean_text;
use crate::glob;
use globset::GlobMatcher;

/// The most patterns of a file.
const MAX_PATTERNS: usize = 10_000;

/// A pattern that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(".dockerignore line {line}: {pattern:?}: {why}")]
pub struct BadIgnore {
    /// Line, from 1.
    pub line: usize,
    /// The pattern.
    pub pattern: String,
    /// What is wrong with it.
    pub why: String,
}

/// A `.dockerignore` file.
#[derive(Debug, Clone, Default)]
pub struct Ignore {
    rules: Vec<(GlobMatcher, bool)>,
}

impl Ignore {
    /// Reads a file.
    ///
    /// # Errors
    /// A pattern cannot be read.
    pub fn new(text: &str) -> Result<Self, BadIgnore> {
        let mut rules = Vec::new();
        for (number, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
            let line = if line.starts_with('#') { "" } else { line.trim() };
            let (pattern, takes_back) = match line.strip_prefix('!') {
                Some(rest) => (rest.trim(), true),
                None => (line, false),
            };
            if pattern.is_empty() {
                continue;
            }
            let bad = |why: String| BadIgnore { line: number + 1, pattern: pattern.chars().take(80).collect(), why };
            let pattern = clean_text(pattern).unwrap_or_default();
            if pattern.is_empty() {
                continue;
            }
            if rules.len() >= MAX_PATTERNS {
                return Err(bad(format!("more than {MAX_PATTERNS} patterns")));
            }
            rules.push((glob::compile(&pattern, true, true).map_err(bad)?, takes_back));
        }
        Ok(Self { rules })
    }

    /// Whether a path of the context, relative and without `.` and `..`, is left out.
    pub fn excludes(&self, path: &[u8]) -> bool {
        let mut excluded = false;
        for (matcher, takes_back) in &self.rules {
            if excluded == *takes_back && with_parents(path).any(|p| matcher.is_match(glob::path(p))) {
                excluded = !takes_back;
            }
        }
        excluded
    }

    /// Whether something below an excluded directory may be taken back, so that it has to be looked into.
    pub fn takes_back(&self) -> bool {
        self.rules.iter().any(|(_, takes_back)| *takes_back)
    }
}

fn with_parents(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    let parents = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| &path[..at]);
    parents.chain(std::iter::once(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_docker_ignores() {
        let ignore = Ignore::new(
            "# comment\n*/temp*\n*/*/temp*\ntemp?\n\n*.md\n!README*.md\nREADME-secret.md\n**/*.pyc\n/root-only\nbuild/\n!build/keep\n",
        )
        .unwrap();
        for (path, excluded) in [
            ("somedir/temporary.txt", true),
            ("somedir/subdir/temporary.txt", true),
            ("a/b/c/temporary.txt", false),
            ("tempa", true),
            ("temp", false),
            ("notes.md", true),
            ("docs/notes.md", false),
            ("README.md", false),
            ("README-1.md", false),
            ("README-secret.md", true),
            ("x.pyc", true),
            ("a/b/x.pyc", true),
            ("root-only", true),
            ("a/root-only", false),
            ("build", true),
            ("build/x", true),
            ("build/keep", false),
            ("build/keep/deep", false),
            ("# comment", false),
        ] {
            assert_eq!(ignore.excludes(path.as_bytes()), excluded, "{path}");
        }
        assert!(ignore.takes_back());
        assert!(!Ignore::default().excludes(b"anything"));
    }

    #[test]
    fn names_that_are_no_text_are_compared_as_bytes() {
        let ignore = Ignore::new("*.log\nd/caf*\n").unwrap();
        for (path, excluded) in
            [(&b"caf\xe9.log"[..], true), (b"d/caf\xe9", true), (b"d/caf\xe9/x", true), (b"caf\xe9", false)]
        {
            assert_eq!(ignore.excludes(path), excluded, "{path:?}");
        }
    }

    #[test]
    fn everything_but() {
        let ignore = Ignore::new("*\n!src\n").unwrap();
        assert_eq!(["a", "src", "src/x"].map(|p| ignore.excludes(p.as_bytes())), [true, false, false]);
        let ignore = Ignore::new("**\n!Dockerfile").unwrap();
        assert_eq!(["a/b", "Dockerfile"].map(|p| ignore.excludes(p.as_bytes())), [true, false]);
    }

    #[test]
    fn bad_patterns_are_named() {
        let error = Ignore::new("ok\n[a").unwrap_err();
        assert_eq!((error.line, error.pattern.as_str()), (2, "[a"));
    }
}
