//! Names of archive entries: taken apart, checked, and never trusted.

use crate::error::EntryFault;

/// Longest path accepted, in bytes. `PATH_MAX` is 4096 and a staging directory's own path comes before it.
pub(crate) const MAX_PATH_BYTES: usize = 3584;
/// Most directories above an entry.
pub(crate) const MAX_DEPTH: usize = 1024;
const NAME_MAX: usize = 255;

/// Splits a name into components without `.` and empty ones; an empty result is the root.
///
/// # Errors
/// Absolute names, `..`, NUL, and names beyond the bounds above.
pub(crate) fn components(name: &[u8]) -> Result<Vec<&[u8]>, EntryFault> {
    if name.is_empty() {
        return Err(EntryFault::EmptyName);
    }
    if name.contains(&0) {
        return Err(EntryFault::NulInName);
    }
    if name[0] == b'/' {
        return Err(EntryFault::AbsoluteName);
    }
    let mut parts = Vec::new();
    for part in name.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err(EntryFault::ParentComponent),
            _ if part.len() > NAME_MAX => return Err(EntryFault::NameTooLong),
            _ => parts.push(part),
        }
    }
    if parts.len() > MAX_DEPTH {
        return Err(EntryFault::TooDeep(MAX_DEPTH));
    }
    if parts.iter().map(|p| p.len() + 1).sum::<usize>() > MAX_PATH_BYTES {
        return Err(EntryFault::PathTooLong(MAX_PATH_BYTES));
    }
    Ok(parts)
}

/// Joins a canonical directory (empty for the root) and a name.
pub(crate) fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(dir.len() + 1 + name.len());
    out.extend_from_slice(dir);
    if !dir.is_empty() {
        out.push(b'/');
    }
    out.extend_from_slice(name);
    out
}

/// The directory that a canonical path lies in; empty for the root.
pub(crate) fn parent(path: &[u8]) -> &[u8] {
    path.iter().rposition(|b| *b == b'/').map_or(b"", |at| &path[..at])
}

/// A name for messages: lossy, bounded.
pub(crate) fn display(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(&name[..name.len().min(300)]);
    if name.len() > 300 { format!("{text}…") } else { text.into_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_or_refused() {
        assert_eq!(components(b"./a//b/./c/").unwrap(), [b"a", b"b", b"c"]);
        assert!(components(b"./").unwrap().is_empty());
        assert!(matches!(components(b"a/../b"), Err(EntryFault::ParentComponent)));
        assert!(matches!(components(b"/etc"), Err(EntryFault::AbsoluteName)));
        assert!(matches!(components(b"a\0b"), Err(EntryFault::NulInName)));
        assert!(matches!(components(b""), Err(EntryFault::EmptyName)));
        assert!(matches!(components(&[b'x'; 256]), Err(EntryFault::NameTooLong)));
        assert!(components(&[b'x'; 255]).is_ok());
        assert!(matches!(components(&b"a/".repeat(4097)), Err(EntryFault::TooDeep(_))));
        assert!(matches!(
            components(&[b"x".repeat(200), b"/".to_vec()].concat().repeat(20)),
            Err(EntryFault::PathTooLong(_))
        ));
    }

    #[test]
    fn parents_end_at_the_root() {
        assert_eq!((parent(b"a/bc/d"), parent(b"a"), parent(b"")), (&b"a/bc"[..], &b""[..], &b""[..]));
    }
}
