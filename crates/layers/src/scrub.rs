//! Rules for what a snapshot leaves out: caches, histories, answers.

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

/// Rules; none leave out nothing.
#[derive(Debug, Clone, Default)]
pub struct Scrub(GlobSet);

/// A rule that cannot be.
#[derive(Debug, thiserror::Error)]
#[error("scrub rule {rule:?}: {reason}")]
pub struct ScrubError {
    rule: String,
    reason: String,
}

impl Scrub {
    /// Rules as `SnapshotSpec` has them.
    ///
    /// # Errors
    /// One that is not absolute or not a pattern, or too many.
    pub fn new(rules: &[String]) -> Result<Self, ScrubError> {
        const MOST: usize = 1000;
        let mut set = GlobSetBuilder::new();
        let refuse = |rule: &str, reason: String| ScrubError { rule: rule.chars().take(200).collect(), reason };
        if rules.len() > MOST {
            return Err(refuse("", format!("{} rules: at most {MOST}", rules.len())));
        }
        for rule in rules {
            let Some(relative) = rule.strip_prefix('/').filter(|r| !r.is_empty()) else {
                return Err(refuse(rule, "a rule is an absolute path".to_owned()));
            };
            if relative.split('/').any(|name| matches!(name, "." | "..")) {
                return Err(refuse(rule, "no path in a sandbox has . or .. in it".to_owned()));
            }
            let glob = GlobBuilder::new(relative.trim_end_matches('/')).literal_separator(true).build();
            set.add(glob.map_err(|e| refuse(rule, e.kind().to_string()))?);
        }
        set.build().map(Self).map_err(|e| refuse("", e.to_string()))
    }

    /// Whether a path below the root, without a slash at its beginning, is left out with all below it.
    pub(crate) fn matches(&self, path: &[u8]) -> bool {
        use std::os::unix::ffi::OsStrExt as _;
        !self.0.is_empty() && self.0.is_match(std::ffi::OsStr::from_bytes(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_absolute_patterns() {
        let scrub =
            Scrub::new(&["/root/.cache".into(), "/home/*/.bash_history".into(), "/**/__pycache__".into()]).unwrap();
        let yes = ["root/.cache", "home/a/.bash_history", "a/b/__pycache__", "__pycache__"];
        let no = ["root/.cached", "root", "home/a/b/.bash_history", ".cache"];
        assert!(yes.iter().all(|p| scrub.matches(p.as_bytes())));
        assert!(!no.iter().any(|p| scrub.matches(p.as_bytes())));
        for bad in ["", "/", "relative", "/a[", "/{a", "/../etc", "/a/./b"] {
            assert!(Scrub::new(&[bad.to_owned()]).is_err(), "{bad}");
        }
        assert!(!Scrub::default().matches(b"x"));
    }
}
