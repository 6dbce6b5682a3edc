//! Here-documents in the middle of a `RUN`, which the parser does not know: they are lifted out before it reads.
//!
//! Their lines become comments, so that all lines keep their numbers, and go back into the command, where the shell
//! reads them.

use crate::error::{DockerfileError, Fault};
use std::collections::BTreeMap;

/// A Dockerfile without such documents, and the documents by the line of their instruction.
#[derive(Debug)]
pub struct Lifted {
    /// What the parser reads.
    pub text: String,
    /// Documents with their closing marks.
    pub documents: BTreeMap<usize, String>,
}

/// Lifts them out.
///
/// # Errors
/// One has no end.
pub fn lift(text: &str) -> Result<Lifted, DockerfileError> {
    let escape = escape_of(text);
    let mut lifted = Lifted { text: String::with_capacity(text.len()), documents: BTreeMap::new() };
    let mut lines = text.split_inclusive('\n').enumerate();
    while let Some((number, line)) = lines.next() {
        lifted.text.push_str(line);
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with('#') {
            continue;
        }
        let mut whole = line.to_owned();
        let mut last = line;
        while last.trim_end().ends_with(escape) {
            let Some((_, next)) = lines.next() else { break };
            lifted.text.push_str(next);
            // A comment within goes on with the instruction.
            if next.trim().is_empty() || next.trim_start().starts_with('#') {
                continue;
            }
            whole.push_str(next);
            last = next;
        }
        let whole = crate::words::join(&whole, escape);
        let (name, rest) = whole.split_once(char::is_whitespace).unwrap_or((&whole, ""));
        let name = name.to_ascii_uppercase();
        let rest = after_flags(rest);
        if !matches!(name.as_str(), "RUN" | "COPY" | "ADD") || (rest.starts_with('[') && rest.ends_with(']')) {
            continue;
        }
        let marks = if name == "RUN" { marks(rest) } else { rest.split_whitespace().filter_map(mark).collect() };
        let ours = name == "RUN" && !rest.starts_with("<<");
        for (mark, tabs) in marks {
            let mut document = String::new();
            loop {
                let Some((_, line)) = lines.next() else {
                    let text = format!("expected end of here-document ({})", crate::words::shown(&mark));
                    return Err(DockerfileError::new(number + 1, &name, Fault::Syntax(text)));
                };
                lifted.text.push_str(if ours { "#\n" } else { line });
                document.push_str(line);
                let line = line.trim_end_matches(['\n', '\r']);
                if (if tabs { line.trim_start_matches('\t') } else { line }) == mark {
                    break;
                }
            }
            if ours {
                lifted.documents.entry(number + 1).or_default().push_str(&document);
            }
        }
    }
    Ok(lifted)
}

/// The escape sign that a directive gives.
fn escape_of(text: &str) -> char {
    let directives = text.lines().map_while(|line| line.trim_start().strip_prefix('#')?.split_once('='));
    let escape = directives.filter(|(name, _)| name.trim().eq_ignore_ascii_case("escape")).map(|(_, sign)| sign.trim());
    if escape.into_iter().next() == Some("`") { '`' } else { '\\' }
}

fn after_flags(mut rest: &str) -> &str {
    rest = rest.trim_start();
    while rest.starts_with("--") {
        rest = rest.split_once(char::is_whitespace).map_or("", |(_, rest)| rest).trim_start();
    }
    rest
}

/// A word as a mark, and whether tabs before it are taken off.
fn mark(word: &str) -> Option<(String, bool)> {
    let word = word.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix("<<")?;
    let (word, tabs) = word.strip_prefix('-').map_or((word, false), |word| (word, true));
    let mark = word.replace(['"', '\'', '\\'], "");
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    (!mark.is_empty() && !mark.starts_with(|c: char| c.is_ascii_digit()) && mark.chars().all(fits))
        .then_some((mark, tabs))
}

/// The marks of a command line. What is quoted is none.
fn marks(line: &str) -> Vec<(String, bool)> {
    let mut found = Vec::new();
    let mut quote = None;
    let mut previous = ' ';
    for (at, c) in line.char_indices() {
        match quote {
            None if c == '"' || c == '\'' => quote = Some(c),
            Some(open) if c == open => quote = None,
            None if c == '<' && previous != '<' && line[at..].starts_with("<<") => {
                let end =
                    line[at + 2..].find(|c: char| c.is_whitespace() || matches!(c, ';' | '|' | '&' | '>' | '<' | ')'));
                found.extend(mark(&line[at..end.map_or(line.len(), |end| at + 2 + end)]));
            }
            _ => {}
        }
        previous = c;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_documents_in_the_middle_are_lifted() {
        let text = "FROM bb\nRUN <<EOF\nleft\nEOF\nRUN cat <<A <<-\"B\" > /x\none\nA\n\ttwo\n\tB\nCOPY <<C /x\nRUN y <<EOF\nC\nRUN echo $((1 << 2)) '<<no' <<<word\n";
        let lifted = lift(text).unwrap();
        assert_eq!(lifted.documents, [(5, "one\nA\n\ttwo\n\tB\n".to_owned())].into());
        assert_eq!(lifted.text.lines().count(), text.lines().count());
        assert!(lifted.text.contains("left") && lifted.text.contains("RUN y") && !lifted.text.contains("one"));
        let error = lift("FROM bb\nRUN cat <<EOF\nx\n").unwrap_err();
        assert_eq!(error.line, 2);
    }
}
