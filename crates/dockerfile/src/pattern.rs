//! `${name#pattern}`, `${name%pattern}` and `${name/pattern/text}`.

use crate::glob;

/// What is done to a variable's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// `#`: the shortest head goes.
    Head,
    /// `##`: the longest head goes.
    LongHead,
    /// `%`: the shortest tail goes.
    Tail,
    /// `%%`: the longest tail goes.
    LongTail,
}

/// The longest value that patterns are tried on: every start and end of it is tried.
const MAX_VALUE: usize = 4096;

fn checked(value: &str, pattern: &str) -> Result<globset::GlobMatcher, String> {
    if value.len() > MAX_VALUE {
        return Err(format!("a value of more than {MAX_VALUE} bytes cannot be matched"));
    }
    glob::compile(pattern, false, true).map_err(|why| format!("pattern {:?}: {why}", crate::words::shown(pattern)))
}

/// Cuts what the pattern matches.
pub fn cut(value: &str, pattern: &str, how: Cut) -> Result<String, String> {
    let matcher = checked(value, pattern)?;
    let cuts: Vec<usize> = value.char_indices().map(|(at, _)| at).chain([value.len()]).collect();
    let mut heads = cuts.iter().copied().filter(|at| matcher.is_match(&value[..*at]));
    let mut tails = cuts.iter().copied().filter(|at| matcher.is_match(&value[*at..]));
    let left = match how {
        Cut::Head => heads.next().map(|at| &value[at..]),
        Cut::LongHead => heads.next_back().map(|at| &value[at..]),
        Cut::Tail => tails.next_back().map(|at| &value[..at]),
        Cut::LongTail => tails.next().map(|at| &value[..at]),
    };
    Ok(left.unwrap_or(value).to_owned())
}

/// Replaces the first stretch that the pattern matches, the longest from where it begins, or all of them.
pub fn replace(value: &str, pattern: &str, with: &str, all: bool) -> Result<String, String> {
    const MAX_REPLACED: usize = 512;
    if value.len() > MAX_REPLACED {
        return Err(format!("a value of more than {MAX_REPLACED} bytes cannot be replaced in"));
    }
    let matcher = checked(value, pattern)?;
    let mut out = String::new();
    let mut rest = value;
    'from: while let Some(first) = rest.chars().next() {
        let ends = rest.char_indices().map(|(at, c)| at + c.len_utf8());
        for end in ends.rev() {
            if matcher.is_match(&rest[..end]) {
                out.push_str(with);
                rest = &rest[end..];
                if all {
                    continue 'from;
                }
                break 'from;
            }
        }
        out.push(first);
        rest = &rest[first.len_utf8()..];
    }
    out.push_str(rest);
    Ok(out)
}
