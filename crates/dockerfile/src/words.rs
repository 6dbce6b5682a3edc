//! Words of an instruction: told apart by blanks that are neither quoted nor escaped. Quotes stay in them.

/// The words of a text.
///
/// # Errors
/// A quote is not closed.
pub fn split(text: &str, escape: char) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match quote {
            None if c.is_whitespace() => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                continue;
            }
            None if c == '"' || c == '\'' => quote = Some(c),
            Some(open) if c == open => quote = None,
            // Within single quotes nothing is escaped.
            None | Some('"') if c == escape => {
                word.push(c);
                word.extend(chars.next());
                continue;
            }
            _ => {}
        }
        word.push(c);
    }
    if let Some(open) = quote {
        return Err(format!("a quote ({open}) is not closed"));
    }
    if !word.is_empty() {
        words.push(word);
    }
    Ok(words)
}

/// Pairs of `ENV` and `LABEL`, not yet expanded: `name=value …`, or one name and the rest of the line.
///
/// # Errors
/// A quote is not closed, or a pair has no `=`.
pub fn pairs(text: &str, escape: char) -> Result<Vec<(String, String)>, String> {
    let words = split(text, escape)?;
    let Some(first) = words.first() else { return Err("it needs at least one argument".to_owned()) };
    if !first.contains('=') {
        let rest = text.trim_start().strip_prefix(first.as_str()).unwrap_or_default().trim();
        if rest.is_empty() {
            return Err(format!("{:?} has no value: name=value", shown(first)));
        }
        return Ok(vec![(first.clone(), rest.to_owned())]);
    }
    let pair = |word: String| match word.split_once('=') {
        Some(("", _)) => Err(format!("{:?} has no name: name=value", shown(&word))),
        Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
        None => Err(format!("{:?} is no name=value", shown(&word))),
    };
    words.into_iter().map(pair).collect()
}

/// A text short enough for a message.
pub fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}

/// The text of a shell form: continued lines joined, comments and empty lines among them left out.
pub fn join(text: &str, escape: char) -> String {
    let mut joined = String::with_capacity(text.len());
    let mut continued = false;
    for line in text.lines() {
        if continued && (line.trim().is_empty() || line.trim_start().starts_with('#')) {
            continue;
        }
        let trimmed = line.trim_end_matches([' ', '\t']);
        match trimmed.strip_suffix(escape) {
            Some(part) => {
                joined.push_str(part);
                continued = true;
            }
            None => {
                joined.push_str(line);
                break;
            }
        }
    }
    joined.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_their_quotes() {
        let split = |text| split(text, '\\').unwrap();
        assert_eq!(split(r#"a="b c" d='e "f' g\ h"#), [r#"a="b c""#, r#"d='e "f'"#, r"g\ h"]);
        assert_eq!(split(r#"a="b\" c" d"#), [r#"a="b\" c""#, "d"]);
        assert_eq!(super::split("a`  b", '`').unwrap(), ["a` ", "b"]);
        assert!(super::split("a 'b", '\\').is_err());
    }

    #[test]
    fn both_forms_of_pairs() {
        let pairs = |text| pairs(text, '\\');
        assert_eq!(pairs("A=1 B=2=3").unwrap(), [("A".into(), "1".into()), ("B".into(), "2=3".into())]);
        assert_eq!(pairs("A b  c=d").unwrap(), [("A".into(), "b  c=d".into())]);
        for bad in ["A", "A=1 B", "=1", ""] {
            assert!(pairs(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn continued_lines_become_one() {
        let text = "a && \\\n  # comment\n\n  b \\  \n && c";
        assert_eq!(join(text, '\\'), "a &&   b  && c");
        assert_eq!(join("echo # not a comment", '\\'), "echo # not a comment");
    }
}
