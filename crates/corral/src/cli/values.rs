//! Values of options.

use clap::Args;
use corral_api::command::StreamName;
use corral_api::image::LayerKind;
use std::time::Duration;

/// A key and its value.
pub type Pair = (String, String);

/// What a sandbox starts with.
#[derive(Debug, Clone, Default, Args)]
pub struct EntrypointArgs {
    /// Word of the command that sandboxes start with, instead of the image's entry point; once for each word.
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    pub entrypoint: Vec<String>,
    /// Start nothing, whatever the image's entry point.
    #[arg(long, conflicts_with = "entrypoint")]
    pub no_entrypoint: bool,
    /// Argument of the entry point, instead of the image's; once for each.
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    pub cmd: Vec<String>,
}

impl EntrypointArgs {
    /// The entry point, where one or none was asked for.
    pub fn entrypoint(&self) -> Option<Vec<String>> {
        (self.no_entrypoint || !self.entrypoint.is_empty()).then(|| self.entrypoint.clone())
    }

    /// Its arguments, where any were given.
    pub fn cmd(&self) -> Option<Vec<String>> {
        (!self.cmd.is_empty()).then(|| self.cmd.clone())
    }
}

/// `K=V`; the value may hold more of `=`.
///
/// # Errors
/// There is no `=`, or nothing before it.
pub fn key_value(text: &str) -> Result<Pair, String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.into(), value.into())),
        _ => Err("expected KEY=VALUE".into()),
    }
}

/// A time such as `500ms`, `90s`, `10m`, `2h`; a bare number means seconds.
///
/// # Errors
/// It is no such text, or too long.
pub fn milliseconds(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err("expected a time such as 500ms, 90s, 10m or 2h".into()),
    };
    let number: u64 = number.parse().map_err(|_| "expected a time such as 500ms, 90s, 10m or 2h".to_owned())?;
    number.checked_mul(scale).ok_or_else(|| "the time is too long".into())
}

/// How long ended sandboxes are kept: a time from a second on.
///
/// # Errors
/// It is no time, or shorter.
pub fn keep_time(text: &str) -> Result<Duration, String> {
    match milliseconds(text)? {
        0..1000 => Err("expected at least 1s: callers read results after the end".into()),
        ms => Ok(Duration::from_millis(ms)),
    }
}

/// A number from one on.
///
/// # Errors
/// It is no such number.
pub fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a number from 1 on".into())
}

/// Limit of a cache, in MiB.
///
/// # Errors
/// It is no such limit.
pub fn cache_mib(text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a number of MiB from 1 on".into())
}

/// Size of the image for writable layers, in MiB: smaller than the least, btrfs cannot be made in it.
///
/// # Errors
/// It is no such size.
pub fn disk_step(text: &str) -> Result<u64, String> {
    const LEAST_MIB: u64 = 256;
    const MOST_MIB: u64 = 1 << 24;
    text.parse()
        .ok()
        .filter(|mib| (LEAST_MIB..=MOST_MIB).contains(mib))
        .ok_or_else(|| format!("expected a number from {LEAST_MIB} to {MOST_MIB}"))
}

pub fn stream_name(text: &str) -> Result<StreamName, String> {
    match text {
        "stdout" => Ok(StreamName::Stdout),
        "stderr" => Ok(StreamName::Stderr),
        _ => Err("expected stdout or stderr".into()),
    }
}

pub fn layer_kind(text: &str) -> Result<LayerKind, String> {
    match text {
        "workspace" => Ok(LayerKind::Workspace),
        "toolkit" => Ok(LayerKind::Toolkit),
        _ => Err("expected workspace or toolkit".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_pairs() {
        assert_eq!(milliseconds("500ms"), Ok(500));
        assert_eq!(milliseconds("2"), Ok(2000));
        assert_eq!(milliseconds("2h"), Ok(7_200_000));
        for bad in ["", "s", "-1s", "1d", "1.5s", "99999999999999999999h"] {
            assert!(milliseconds(bad).is_err(), "{bad}");
        }
        assert_eq!(keep_time("1s"), Ok(Duration::from_secs(1)));
        assert_eq!((positive("1"), disk_step("256")), (Ok(1), Ok(256)));
        assert!(keep_time("999ms").is_err() && positive("0").is_err() && disk_step("255").is_err());
        assert_eq!(key_value("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert!(key_value("=b").is_err() && key_value("A").is_err());
    }
}
