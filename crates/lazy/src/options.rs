//! What the program is told on its command line, and how it tells the processes it starts.

use crate::server::Config;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// Options of a holder and its servers.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where the store is: `file:///dir` or `s3://…`.
    pub store: String,
    /// The control socket.
    pub socket: PathBuf,
    /// The program that a hang-up signal has it go on as; the running one's path where none is named.
    pub program: Option<PathBuf>,
    /// How long a server may not answer before it is replaced; zero is for ever.
    pub still: Duration,
    /// How the server works.
    pub server: Config,
}

/// How long a server may not answer, usually.
const STILL: Duration = Duration::from_secs(5);

/// Words that are no options.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// No such option.
    #[error("unknown option {0}")]
    Unknown(String),
    /// One without a value, or with one that cannot be.
    #[error("{name}: {value:?} is not {expected}")]
    Value {
        /// The option.
        name: String,
        /// What stands there.
        value: String,
        /// What should.
        expected: &'static str,
    },
    /// One that must be there.
    #[error("{0} is missing")]
    Missing(&'static str),
}

/// What each option is.
pub const HELP: &str = "  --root DIR         the directory that holds `layers`; files appear in DIR/lazy
  --store URL        file:///dir or s3://bucket/prefix?region=…
  --socket PATH      the control socket
  --program PATH     what a SIGHUP has it go on as
  --still-ms N       how long the server may not answer before it is replaced; 0: for ever (5000)
  --wait-ms N        how long a read waits for the store (60000)
  --memory-mib N     bytes under way (256)
  --run-kib N        bytes of one read of the store (4096)
  --calls N          reads of the store at once (32)
  --ahead-kib N      bytes brought before a reader that goes forward (8192)
  --around-kib N     stored bytes that come with a chunk, behind it; half as many before it (128)
  --trace-ms N       how long first reads are recorded (60000)
  --trace-chunks N   how many are recorded (16384)
  --threads N        threads that answer the kernel (4)
  --boot-id TEXT     the boot under which presence is believed, for tests";

impl Options {
    /// Usual values.
    pub fn new(root: impl Into<PathBuf>, store: impl Into<String>, socket: impl Into<PathBuf>) -> Self {
        Self { store: store.into(), socket: socket.into(), program: None, still: STILL, server: Config::new(root) }
    }

    /// Reads words.
    ///
    /// # Errors
    /// They are none of the options, or root, store or socket is missing.
    pub fn parse(words: &[String]) -> Result<Self, OptionsError> {
        let mut options = Self::new("", "", "");
        let mut words = words.iter();
        while let Some(name) = words.next() {
            let value = words.next().map_or("", String::as_str);
            options.set(name, value)?;
        }
        let missing = |path: &Path| path.as_os_str().is_empty();
        match () {
            () if missing(&options.server.root) => Err(OptionsError::Missing("--root")),
            () if options.store.is_empty() => Err(OptionsError::Missing("--store")),
            () if missing(&options.socket) => Err(OptionsError::Missing("--socket")),
            () => Ok(options),
        }
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), OptionsError> {
        let server = &mut self.server;
        let path = || if value.is_empty() { Err(wrong(name, value, "a path")) } else { Ok(PathBuf::from(value)) };
        match name {
            "--root" => server.root = path()?,
            "--store" => self.store = value.to_owned(),
            "--socket" => self.socket = path()?,
            "--program" => self.program = Some(path()?),
            "--still-ms" => self.still = Duration::from_millis(number(name, value)?),
            "--wait-ms" => server.wait_limit = Duration::from_millis(number(name, value)?),
            "--memory-mib" => server.limits.bytes = number::<u32>(name, value).map(|mib| u64::from(mib) << 20)?,
            "--run-kib" => server.limits.run_bytes = number::<u32>(name, value).map(|kib| u64::from(kib) << 10)?,
            "--calls" => server.limits.calls = number(name, value)?,
            "--ahead-kib" => server.ahead_bytes = number::<u32>(name, value).map(|kib| u64::from(kib) << 10)?,
            "--around-kib" => server.around_bytes = number::<u32>(name, value).map(|kib| u64::from(kib) << 10)?,
            "--trace-ms" => server.trace_time = Duration::from_millis(number(name, value)?),
            "--trace-chunks" => server.trace_chunks = number(name, value)?,
            "--threads" => server.threads = number(name, value)?,
            "--boot-id" => server.boot_id = Some(value.to_owned()),
            other => return Err(OptionsError::Unknown(other.to_owned())),
        }
        Ok(())
    }

    /// The words that say the same.
    pub fn words(&self) -> Vec<String> {
        let text = |path: &Path| path.display().to_string();
        let server = &self.server;
        let mut words = Vec::new();
        let mut add = |name: &str, value: String| words.extend([name.to_owned(), value]);
        add("--root", text(&server.root));
        add("--store", self.store.clone());
        add("--socket", text(&self.socket));
        if let Some(program) = &self.program {
            add("--program", text(program));
        }
        add("--still-ms", self.still.as_millis().to_string());
        add("--wait-ms", server.wait_limit.as_millis().to_string());
        add("--memory-mib", (server.limits.bytes >> 20).to_string());
        add("--run-kib", (server.limits.run_bytes >> 10).to_string());
        add("--calls", server.limits.calls.to_string());
        add("--ahead-kib", (server.ahead_bytes >> 10).to_string());
        add("--around-kib", (server.around_bytes >> 10).to_string());
        add("--trace-ms", server.trace_time.as_millis().to_string());
        add("--trace-chunks", server.trace_chunks.to_string());
        add("--threads", server.threads.to_string());
        if let Some(boot) = &server.boot_id {
            add("--boot-id", boot.clone());
        }
        words
    }
}

fn wrong(name: &str, value: &str, expected: &'static str) -> OptionsError {
    OptionsError::Value { name: name.to_owned(), value: value.to_owned(), expected }
}

fn number<T: FromStr>(name: &str, value: &str) -> Result<T, OptionsError> {
    value.parse().map_err(|_| wrong(name, value, "a number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_understood() {
        let mut options = Options::new("/r", "file:///s", "/c");
        options.server.boot_id = Some("b".to_owned());
        options.program = Some("/p".into());
        options.server.limits.calls = 7;
        let words = options.words();
        assert_eq!(Options::parse(&words).unwrap().words(), words);
        let parse = |text: &str| Options::parse(&text.split(' ').map(str::to_owned).collect::<Vec<_>>()).unwrap_err();
        assert_eq!(parse("--root /r --store x"), OptionsError::Missing("--socket"));
        assert_eq!(parse("--colour red"), OptionsError::Unknown("--colour".to_owned()));
        assert!(matches!(parse("--calls many"), OptionsError::Value { .. }));
        assert!(matches!(parse("--root"), OptionsError::Value { .. }));
    }
}
