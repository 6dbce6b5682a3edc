//! What `COPY` and `ADD` take from a tree of files: a context, or the files of a stage.
//!
//! Names of files are bytes, as the kernel has them. What a Dockerfile says is text.

use crate::glob;
use std::collections::BTreeMap;

/// The most links on the way to a source.
const MAX_LINKS: usize = 40;

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link, and where it leads.
    Symlink(Vec<u8>),
}

/// What a tree tells of its entries.
pub trait Listed {
    /// What it is.
    fn kind(&self) -> &EntryKind;
}

impl Listed for EntryKind {
    fn kind(&self) -> &EntryKind {
        self
    }
}

/// An entry to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selected {
    /// Where it is in the tree.
    pub path: Vec<u8>,
    /// Where it goes, below the destination. A file's name for a source that is a file.
    pub to: Vec<u8>,
    /// It lies in a directory that is a source, and is not one itself.
    pub inner: bool,
}

/// Why nothing can be copied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
    /// Nothing of this name.
    #[error("source {0:?}: there is no such file in the build context, or .dockerignore leaves it out")]
    Missing(String),
    /// It leads out of the tree.
    #[error("source {0:?} leads out of the build context")]
    Outside(String),
    /// It cannot be read.
    #[error("source {source:?}: {why}", source = .0, why = .1)]
    BadPattern(String, String),
    /// Links lead to links without an end.
    #[error("source {0:?}: too many links")]
    Links(String),
}

/// A path without `.`, `..`, doubled and leading slashes; nothing when it leads out of where it begins.
pub fn clean(path: &[u8]) -> Option<Vec<u8>> {
    let mut names: Vec<&[u8]> = Vec::new();
    for name in path.split(|byte| *byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." => {
                names.pop()?;
            }
            other => names.push(other),
        }
    }
    Some(names.join(&b'/'))
}

/// As [`clean`], of a text.
pub fn clean_text(path: &str) -> Option<String> {
    // Text that is cut at slashes stays text.
    clean(path.as_bytes()).and_then(|cleaned| String::from_utf8(cleaned).ok())
}

/// What a source means in a tree, whose paths are as [`clean`] makes them and whose directories are all entries. A
/// directory stands for what lies in it; links to a source are followed, within the tree; links inside are kept.
///
/// # Errors
/// Nothing matches, or the source cannot be read.
pub fn select<T: Listed>(tree: &BTreeMap<Vec<u8>, T>, source: &str) -> Result<Vec<Selected>, SelectError> {
    let shown = || crate::words::shown(source);
    let path = clean_text(source).ok_or_else(|| SelectError::Outside(shown()))?;
    let mut matched = Vec::new();
    if glob::is_pattern(&path) {
        let matcher = glob::compile(&path, true, false).map_err(|why| SelectError::BadPattern(shown(), why))?;
        matched.extend(tree.keys().filter(|p| matcher.is_match(glob::path(p))).cloned());
    } else {
        matched.push(path.into_bytes());
    }
    let mut selected = Vec::new();
    for path in matched {
        let real = resolve(tree, &path, source)?;
        let directory = real.is_empty() || tree.get(&real).is_some_and(|e| *e.kind() == EntryKind::Directory);
        if directory {
            let mut prefix = real.clone();
            if !prefix.is_empty() {
                prefix.push(b'/');
            }
            let below = tree.range(prefix.clone()..).map(|(p, _)| p).take_while(|p| p.starts_with(&prefix));
            selected.push(Selected { path: real, to: Vec::new(), inner: false });
            selected.extend(below.filter(|p| !p.is_empty()).map(|p| Selected {
                path: p.clone(),
                to: p[prefix.len()..].to_owned(),
                inner: true,
            }));
        } else {
            let name = names(&path).next_back().unwrap_or(&path).to_owned();
            selected.push(Selected { path: real, to: name, inner: false });
        }
    }
    if selected.is_empty() { Err(SelectError::Missing(shown())) } else { Ok(selected) }
}

/// Follows links, none of which leads out of the tree: its top is their root.
fn resolve<T: Listed>(tree: &BTreeMap<Vec<u8>, T>, path: &[u8], source: &str) -> Result<Vec<u8>, SelectError> {
    let shown = || crate::words::shown(source);
    let mut todo: Vec<&[u8]> = names(path).rev().collect();
    let mut at: Vec<&[u8]> = Vec::new();
    let mut links = 0;
    while let Some(name) = todo.pop() {
        match name {
            b"." => continue,
            b".." => {
                at.pop();
                continue;
            }
            _ => at.push(name),
        }
        let here = at.join(&b'/');
        match tree.get(&here).map(Listed::kind) {
            None => return Err(SelectError::Missing(shown())),
            Some(EntryKind::Symlink(target)) => {
                links += 1;
                if links > MAX_LINKS {
                    return Err(SelectError::Links(shown()));
                }
                at.pop();
                if target.starts_with(b"/") {
                    at.clear();
                }
                todo.extend(names(target).rev());
            }
            Some(EntryKind::File) if !todo.is_empty() => return Err(SelectError::Missing(shown())),
            Some(_) => {}
        }
    }
    Ok(at.join(&b'/'))
}

/// The names that a path has.
fn names(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/').filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> BTreeMap<Vec<u8>, EntryKind> {
        let link = |to: &str| EntryKind::Symlink(to.into());
        [
            ("a.txt", EntryKind::File),
            ("b.txt", EntryKind::File),
            ("dir", EntryKind::Directory),
            ("dir/a", EntryKind::File),
            ("dir/sub", EntryKind::Directory),
            ("dir/sub/c", EntryKind::File),
            ("dir-2", EntryKind::File),
            ("dir/link", link("../a.txt")),
            ("to-dir", link("dir")),
            ("to-file", link("dir/link")),
            ("absolute", link("/etc/passwd")),
            ("absolute-in", link("/dir/a")),
            ("up", link("../../../a.txt")),
            ("loop", link("loop")),
        ]
        .map(|(p, k)| (p.into(), k))
        .into()
    }

    fn chosen(source: &str) -> Vec<(String, String)> {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        select(&tree(), source).unwrap().into_iter().map(|s| (text(s.path), text(s.to))).collect()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
    }

    #[test]
    fn files_patterns_and_directories() {
        assert_eq!(chosen("a.txt"), pairs(&[("a.txt", "a.txt")]));
        assert_eq!(chosen("/./dir/../a.txt"), pairs(&[("a.txt", "a.txt")]));
        assert_eq!(chosen("*.txt"), pairs(&[("a.txt", "a.txt"), ("b.txt", "b.txt")]));
        let inside = [("dir", ""), ("dir/a", "a"), ("dir/link", "link"), ("dir/sub", "sub"), ("dir/sub/c", "sub/c")];
        assert_eq!(chosen("dir"), pairs(&inside));
        assert_eq!(chosen("dir/"), pairs(&inside));
        assert_eq!(chosen("to-dir"), pairs(&inside), "a link to a source is followed");
        assert_eq!(chosen("dir/s*"), pairs(&[("dir/sub", ""), ("dir/sub/c", "c")]));
        assert_eq!(chosen(".").len(), tree().len() + 1);
    }

    #[test]
    fn links_stay_within_the_tree() {
        assert_eq!(chosen("to-file"), pairs(&[("a.txt", "to-file")]));
        assert_eq!(chosen("absolute-in"), pairs(&[("dir/a", "absolute-in")]));
        assert_eq!(chosen("up"), pairs(&[("a.txt", "up")]), "above the top is the top");
        assert_eq!(chosen("to-dir/sub/c"), pairs(&[("dir/sub/c", "c")]));
        assert_eq!(select(&tree(), "absolute"), Err(SelectError::Missing("absolute".into())));
        assert_eq!(select(&tree(), "loop"), Err(SelectError::Links("loop".into())));
    }

    #[test]
    fn names_that_are_no_text_are_taken_as_they_are() {
        let tree: BTreeMap<Vec<u8>, EntryKind> = [
            (&b"d"[..], EntryKind::Directory),
            (b"d/caf\xe9", EntryKind::File),
            (b"d/\xff", EntryKind::Directory),
            (b"d/\xff/x", EntryKind::File),
            (b"link", EntryKind::Symlink(b"d/caf\xe9".into())),
        ]
        .map(|(path, kind)| (path.to_owned(), kind))
        .into();
        let chosen = |source| -> Vec<_> {
            select(&tree, source).unwrap().into_iter().map(|s| s.to).filter(|to| !to.is_empty()).collect()
        };
        assert_eq!(chosen("d"), [&b"caf\xe9"[..], b"\xff", b"\xff/x"]);
        assert_eq!(chosen("d/caf*"), [b"caf\xe9"]);
        assert_eq!(chosen("d/caf?"), [b"caf\xe9"]);
        assert_eq!(chosen("link"), [b"link"]);
        assert!(matches!(select(&tree, "d/caf\u{fffd}"), Err(SelectError::Missing(_))));
    }

    #[test]
    fn what_is_not_there() {
        for source in ["nope", "a.txt/b", "*.nope", "dir/nope/x"] {
            assert_eq!(select(&tree(), source), Err(SelectError::Missing(source.into())), "{source}");
        }
        for source in ["..", "../x", "a/../../x", "/.."] {
            assert_eq!(select(&tree(), source), Err(SelectError::Outside(source.into())), "{source}");
        }
        assert!(matches!(select(&tree(), "[a"), Err(SelectError::BadPattern(..))));
    }
}
