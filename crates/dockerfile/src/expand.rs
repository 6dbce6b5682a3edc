//! Variables in words, as Docker expands them: quotes and escapes are taken off on the way.

use crate::pattern::{self, Cut};
use std::collections::BTreeMap;
use std::iter::Peekable;
use std::str::Chars;

/// How deep substitutions may lie in each other.
const MAX_DEPTH: usize = 32;
/// The longest text a word may become: each line may double a variable.
const MAX_BYTES: usize = 256 << 10;

/// What is known when a word is expanded.
#[derive(Debug, Clone, Copy)]
pub struct Scope<'a> {
    /// Variables of the image and of the stage so far.
    pub env: &'a BTreeMap<String, String>,
    /// Build arguments of the stage, which variables hide.
    pub args: &'a BTreeMap<String, String>,
    /// The escape sign.
    pub escape: char,
}

impl Scope<'_> {
    fn get(&self, name: &str) -> Option<&str> {
        self.env.get(name).or_else(|| self.args.get(name)).map(String::as_str)
    }

    /// Expands a word.
    ///
    /// # Errors
    /// A substitution that cannot be read, a quote that is not closed, a variable that must be set and is not.
    pub fn expand(&self, word: &str) -> Result<String, String> {
        let mut reader = Reader { scope: *self, chars: word.chars().peekable(), depth: 0 };
        reader.until(&[]).map(|(text, _)| text)
    }

    /// Expands variables only, as in a here-document: quotes stay.
    ///
    /// # Errors
    /// As for [`Self::expand`].
    pub fn expand_text(&self, text: &str) -> Result<String, String> {
        let mut reader = Reader { scope: *self, chars: text.chars().peekable(), depth: 0 };
        let mut out = String::new();
        while let Some(c) = reader.chars.next() {
            match c {
                '$' => reader.dollar(&mut out)?,
                '\\' => match reader.chars.next() {
                    Some(c @ ('$' | '\\')) => out.push(c),
                    Some('\n') => {}
                    Some(other) => out.extend(['\\', other]),
                    None => out.push('\\'),
                },
                other => out.push(other),
            }
            check(&out)?;
        }
        Ok(out)
    }
}

fn check(text: &str) -> Result<(), String> {
    if text.len() > MAX_BYTES { Err(format!("it expands to more than {MAX_BYTES} bytes")) } else { Ok(()) }
}

struct Reader<'a> {
    scope: Scope<'a>,
    chars: Peekable<Chars<'a>>,
    depth: usize,
}

impl Reader<'_> {
    /// Reads up to one of these signs, which is taken and told, or to the end where there are none.
    fn until(&mut self, stop: &[char]) -> Result<(String, Option<char>), String> {
        let mut out = String::new();
        while let Some(c) = self.chars.next() {
            if stop.contains(&c) {
                return Ok((out, Some(c)));
            }
            match c {
                '\'' => loop {
                    match self.chars.next() {
                        Some('\'') => break,
                        Some(c) => out.push(c),
                        None => return Err("a quote (') is not closed".to_owned()),
                    }
                },
                '"' => self.quoted(&mut out)?,
                '$' => self.dollar(&mut out)?,
                c if c == self.scope.escape => out.extend(self.chars.next()),
                other => out.push(other),
            }
            check(&out)?;
        }
        if stop.is_empty() { Ok((out, None)) } else { Err("a substitution is not closed with }".to_owned()) }
    }

    /// The rest of a substitution.
    fn word(&mut self) -> Result<String, String> {
        self.until(&['}']).map(|(word, _)| word)
    }

    fn quoted(&mut self, out: &mut String) -> Result<(), String> {
        loop {
            match self.chars.next() {
                Some('"') => return Ok(()),
                Some('$') => self.dollar(out)?,
                Some(c) if c == self.scope.escape => match self.chars.next() {
                    Some(next) if next == '"' || next == '$' || next == self.scope.escape => out.push(next),
                    Some(next) => out.extend([c, next]),
                    None => break,
                },
                Some(c) => out.push(c),
                None => break,
            }
            check(out)?;
        }
        Err("a quote (\") is not closed".to_owned())
    }

    fn name(&mut self) -> String {
        let mut name = String::new();
        while let Some(&c) = self.chars.peek() {
            let fits = if name.is_empty() { c.is_ascii_alphanumeric() || c == '_' } else { is_in_name(c, &name) };
            if !fits {
                break;
            }
            name.push(c);
            self.chars.next();
        }
        name
    }

    /// What follows a `$`.
    fn dollar(&mut self, out: &mut String) -> Result<(), String> {
        if self.chars.peek() != Some(&'{') {
            let name = self.name();
            match name.as_str() {
                "" => out.push('$'),
                name => out.push_str(self.scope.get(name).unwrap_or_default()),
            }
            return Ok(());
        }
        self.chars.next();
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(format!("more than {MAX_DEPTH} substitutions lie in each other"));
        }
        let value = self.braced();
        self.depth -= 1;
        out.push_str(&value?);
        Ok(())
    }

    /// What follows `${`, with the closing brace.
    fn braced(&mut self) -> Result<String, String> {
        let name = self.name();
        if name.is_empty() {
            return Err("a substitution without a name: ${name}".to_owned());
        }
        let value = self.scope.get(&name).map(str::to_owned);
        let bad = || format!("a substitution of {name:?} that cannot be read");
        let mut sign = self.chars.next().ok_or_else(bad)?;
        let colon = sign == ':';
        if colon {
            sign = self.chars.next().ok_or_else(bad)?;
        }
        // With a colon an empty value counts as none.
        let set = value.as_ref().is_some_and(|v| !colon || !v.is_empty());
        let value = value.unwrap_or_default();
        match sign {
            '}' if !colon => Ok(value),
            '-' => self.word().map(|word| if set { value } else { word }),
            '+' => self.word().map(|word| if set { word } else { String::new() }),
            '?' => {
                let word = self.word()?;
                let why = if word.is_empty() { "not set".to_owned() } else { word };
                if set { Ok(value) } else { Err(format!("{name}: {why}")) }
            }
            '#' | '%' if !colon => {
                let twice = self.chars.next_if_eq(&sign).is_some();
                let pattern = self.word()?;
                let how = match (sign, twice) {
                    ('#', false) => Cut::Head,
                    ('#', true) => Cut::LongHead,
                    (_, false) => Cut::Tail,
                    (_, true) => Cut::LongTail,
                };
                pattern::cut(&value, &pattern, how)
            }
            '/' if !colon => {
                let all = self.chars.next_if_eq(&'/').is_some();
                let (pattern, end) = self.until(&['/', '}'])?;
                let with = if end == Some('/') { self.word()? } else { String::new() };
                pattern::replace(&value, &pattern, &with, all)
            }
            _ => Err(bad()),
        }
    }
}

/// Positional parameters are digits only, so that `$1a` is `$1` and an a.
fn is_in_name(c: char, name: &str) -> bool {
    if name.starts_with(|c: char| c.is_ascii_digit()) {
        c.is_ascii_digit()
    } else {
        c.is_ascii_alphanumeric() || c == '_'
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    fn expand(word: &str) -> Result<String, String> {
        let env = map(&[("x", "X"), ("empty", ""), ("path", "a/b/c.tar.gz"), ("both", "env")]);
        let args = map(&[("arg", "ARG"), ("both", "arg")]);
        Scope { env: &env, args: &args, escape: '\\' }.expand(word)
    }

    #[test]
    fn as_docker_expands() {
        for (word, expected) in [
            ("$x", "X"),
            ("${x}", "X"),
            ("a${x}b$x/c", "aXbX/c"),
            ("$xy", ""),
            ("$unset", ""),
            ("$arg $both", "ARG env"),
            ("${unset:-word}", "word"),
            ("${empty:-word}", "word"),
            ("${empty-word}", ""),
            ("${unset-word}", "word"),
            ("${x:-word}", "X"),
            ("${x:+word}", "word"),
            ("${empty:+word}", ""),
            ("${empty+word}", "word"),
            ("${unset:+word}", ""),
            ("${unset:-${x}y}", "Xy"),
            ("${unset:-${also:-deep}}", "deep"),
            ("${x:?gone}", "X"),
            (r"\$x", "$x"),
            (r#""\$x""#, "$x"),
            (r#""a $x""#, "a X"),
            (r#"'a $x'"#, "a $x"),
            (r#""a\b""#, r"a\b"),
            (r"a\b", "ab"),
            (r"a\\b", r"a\b"),
            (r#"a"b"'c'"#, "abc"),
            ("$", "$"),
            ("$$", "$$"),
            ("a$ b", "a$ b"),
            ("$1x", "x"),
            ("${path#*/}", "b/c.tar.gz"),
            ("${path##*/}", "c.tar.gz"),
            ("${path%.*}", "a/b/c.tar"),
            ("${path%%.*}", "a/b/c"),
            ("${path/b/B}", "a/B/c.tar.gz"),
            (r"${path//\//-}", "a-b-c.tar.gz"),
            ("${path/x}", "a/b/c.tar.gz"),
            ("${path#nope}", "a/b/c.tar.gz"),
        ] {
            assert_eq!(expand(word).as_deref(), Ok(expected), "{word}");
        }
    }

    #[test]
    fn what_cannot_be_expanded_says_why() {
        for (word, part) in [
            ("${unset:?must be given}", "unset: must be given"),
            ("${empty:?}", "empty: not set"),
            ("${x", "cannot be read"),
            ("${}", "without a name"),
            ("${x:", "cannot be read"),
            ("${x:=y}", "cannot be read"),
            ("${x:-y", "not closed"),
            ("'a", "not closed"),
            ("\"a", "not closed"),
        ] {
            let error = expand(word).unwrap_err();
            assert!(error.contains(part), "{word}: {error}");
        }
        let deep = "${a:-".repeat(100) + &"}".repeat(100);
        assert!(expand(&deep).unwrap_err().contains("lie in each other"));
        let env = map(&[("big", &"x".repeat(200 << 10))]);
        let scope = Scope { env: &env, args: &BTreeMap::new(), escape: '\\' };
        assert!(scope.expand("$big$big").unwrap_err().contains("more than"));
        assert!(scope.expand("${big#x}").unwrap_err().contains("cannot be matched"));
    }

    #[test]
    fn here_documents_keep_quotes() {
        let env = map(&[("x", "X")]);
        let scope = Scope { env: &env, args: &BTreeMap::new(), escape: '\\' };
        assert_eq!(scope.expand_text("a \"$x\" '$x' \\$x \\n\n").unwrap(), "a \"X\" 'X' $x \\n\n");
    }

    proptest! {
        #[test]
        fn any_text_is_expanded_or_refused(word in ".{0,200}") {
            let _result = expand(&word);
        }

        #[test]
        fn signs_of_substitution_are_expanded_or_refused(word in r"[$\{\}:\-+?#%/x\\'a*\[]{0,60}") {
            let _result = expand(&word);
        }
    }
}
