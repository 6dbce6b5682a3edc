//! What is printed: tables for people, JSON with `--json`, errors on standard error.

use crate::client::ApiError;
use anyhow::Context as _;
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use std::io::Write as _;

/// Prints a JSON document.
///
/// # Errors
/// Standard output is closed.
pub fn print_json<T: Serialize>(value: &T) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, value).context("cannot write the answer")?;
    writeln!(out).context("cannot write the answer")
}

/// Prints one line of JSON at once, for streams.
///
/// # Errors
/// Standard output is closed.
pub fn print_json_line<T: Serialize>(value: &T) -> anyhow::Result<()> {
    print_line(&serde_json::to_string(value).context("cannot write the answer")?)
}

/// Prints a line.
///
/// # Errors
/// Standard output is closed.
pub fn print_line(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).context("cannot write to standard output")
}

/// Prints a table without rules, as `ps` does.
///
/// # Errors
/// Standard output is closed.
pub fn print_table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> anyhow::Result<()> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.iter().copied());
    for row in rows {
        table.add_row(row.into_iter().map(|cell| printable(&cell)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let text: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    print_line(&text.join("\n"))
}

/// Tells something on standard error. Whoever closed it is not told.
pub fn tell(text: std::fmt::Arguments<'_>) {
    let mut err = std::io::stderr().lock();
    err.write_fmt(text).unwrap_or(());
}

/// Text of a sandbox must not steer the terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// `12 MiB` and the like.
pub fn bytes(count: u64) -> String {
    let mut value = count as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

/// A part of a whole, such as `12.5 %`; nothing where there is no whole.
pub fn share(part: u64, whole: u64) -> String {
    if whole == 0 { String::new() } else { format!("{:.1} %", part as f64 * 100.0 / whole as f64) }
}

/// Prints an error: its chain for people, a problem document with `--json`.
pub fn print_error(json: bool, error: &anyhow::Error) {
    let mut err = std::io::stderr().lock();
    let written = if json {
        let document = match error.downcast_ref::<ApiError>() {
            Some(api) => api.document(),
            None => serde_json::json!({ "message": format!("{error:#}") }),
        };
        writeln!(err, "{document}")
    } else {
        writeln!(err, "corral: {}", printable(&format!("{error:#}")))
    };
    // Nowhere is left to report to.
    drop(written);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_control_characters() {
        assert_eq!((bytes(0), bytes(1536), bytes(3 << 30)), ("0 B".into(), "1.5 KiB".into(), "3.0 GiB".into()));
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
    }
}
