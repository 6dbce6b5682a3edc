//! What an operator writes to name a store: a URL.
//!
//! ```text
//! file:///dir?timeout_ms=30000&max_calls=64
//! s3://BUCKET/PREFIX?region=R&endpoint=https://HOST:PORT&path_style=true&allow_http=true
//!                   &credentials=environment|instance|anonymous&timeout_ms=60000
//! ```
//! Everything after the `?` may be left out, except the region or an endpoint. Secrets are never part of a URL.

use crate::error::StoreError;
use crate::key::Key;
use crate::posix::{PosixConfig, PosixStore};
use crate::retrying::{RetryPolicy, Retrying};
use crate::s3::{S3Config, S3Credentials, S3Store};
use crate::store::Store;
use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use url::Url;

/// A store that an operator named.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreConfig {
    /// A directory.
    Posix(PosixConfig),
    /// A bucket.
    S3(S3Config),
}

impl StoreConfig {
    /// Opens the store, with retries. Blocks for a moment where it is a directory.
    ///
    /// # Errors
    /// The directory is not there, or the settings of the bucket are contradictory or lack credentials.
    pub fn open(&self) -> Result<Arc<dyn Store>, StoreError> {
        Ok(match self {
            Self::Posix(config) => Arc::new(Retrying::new(PosixStore::open(config.clone())?, RetryPolicy::default())),
            Self::S3(config) => Arc::new(S3Store::open(config.clone())?),
        })
    }
}

impl FromStr for StoreConfig {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let url = Url::parse(text).map_err(|error| {
            StoreError::config(format!("not a URL ({error}): expected file:///dir or s3://bucket/prefix?region=…"))
        })?;
        // Not repeated in the error: it may hold a secret.
        if !url.username().is_empty() || url.password().is_some() {
            return Err(StoreError::config(
                "credentials do not belong into the store's URL: set AWS_ACCESS_KEY_ID and so on",
            ));
        }
        if url.fragment().is_some() {
            return Err(StoreError::config("a store's URL has no part after '#'"));
        }
        match url.scheme() {
            "file" => posix(&url).map(Self::Posix),
            "s3" => s3(&url).map(Self::S3),
            other => Err(StoreError::config(format!("{other}:// is no store: expected file:// or s3://"))),
        }
    }
}

fn posix(url: &Url) -> Result<PosixConfig, StoreError> {
    let path = url.to_file_path().map_err(|()| StoreError::config("expected file:///dir, with three slashes"))?;
    let mut options = Options::of(url)?;
    let mut config = PosixConfig::new(path);
    if let Some(timeout) = options.millis("timeout_ms")? {
        config.timeout = timeout;
    }
    if let Some(calls) = options.number("max_calls", 1..=1024)? {
        config.max_calls = calls as usize;
    }
    options.finish("timeout_ms, max_calls")?;
    Ok(config)
}

fn s3(url: &Url) -> Result<S3Config, StoreError> {
    let bucket = url.host_str().ok_or_else(|| StoreError::config("expected s3://bucket/prefix: no bucket is named"))?;
    if url.port().is_some() {
        return Err(StoreError::config(
            "s3:// is followed by a bucket, without a port; the service goes into endpoint=…",
        ));
    }
    let mut options = Options::of(url)?;
    let endpoint = match options.take("endpoint") {
        Some(text) => Some(
            Url::parse(&text).map_err(|error| StoreError::config(format!("endpoint={text}: not a URL ({error})")))?,
        ),
        None => None,
    };
    let region = match (options.take("region"), &endpoint) {
        (Some(region), _) => region,
        // What other services than AWS sign with by default.
        (None, Some(_)) => "us-east-1".to_owned(),
        (None, None) => return Err(StoreError::config("a bucket needs region=… (AWS) or endpoint=… (other services)")),
    };
    let mut config = S3Config::new(bucket, region);
    config.endpoint = endpoint;
    config.prefix = match url.path().trim_matches('/') {
        "" => None,
        prefix => Some(Key::parse(prefix)?),
    };
    config.path_style = options.flag("path_style")?;
    config.allow_http = options.flag("allow_http")?;
    config.credentials = match options.take("credentials").as_deref() {
        None | Some("environment") => S3Credentials::Environment,
        Some("instance") => S3Credentials::Instance,
        Some("anonymous") => S3Credentials::Anonymous,
        Some(_) => return Err(StoreError::config("credentials is environment, instance or anonymous")),
    };
    if let Some(timeout) = options.millis("timeout_ms")? {
        config.timeout = timeout;
    }
    options.finish("endpoint, region, path_style, allow_http, credentials, timeout_ms")?;
    Ok(config)
}

/// What stands after the `?`, each at most once.
struct Options(BTreeMap<String, String>);

impl Options {
    fn of(url: &Url) -> Result<Self, StoreError> {
        let mut options = BTreeMap::new();
        for (name, value) in url.query_pairs() {
            if options.insert(name.to_string(), value.to_string()).is_some() {
                return Err(StoreError::config(format!("{name} is given twice")));
            }
        }
        Ok(Self(options))
    }

    fn take(&mut self, name: &str) -> Option<String> {
        self.0.remove(name)
    }

    fn flag(&mut self, name: &str) -> Result<bool, StoreError> {
        match self.take(name).as_deref() {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(other) => Err(StoreError::config(format!("{name}={other}: expected true or false"))),
        }
    }

    fn number(&mut self, name: &str, within: std::ops::RangeInclusive<u64>) -> Result<Option<u64>, StoreError> {
        let Some(text) = self.take(name) else { return Ok(None) };
        match text.parse() {
            Ok(number) if within.contains(&number) => Ok(Some(number)),
            _ => Err(StoreError::config(format!(
                "{name}={text}: expected a number from {} to {}",
                within.start(),
                within.end()
            ))),
        }
    }

    fn millis(&mut self, name: &str) -> Result<Option<Duration>, StoreError> {
        Ok(self.number(name, 100..=3_600_000)?.map(Duration::from_millis))
    }

    /// Refuses what is left; only its name is told, as the value may be a secret.
    fn finish(self, known: &str) -> Result<(), StoreError> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => Err(StoreError::config(format!("unknown option {name}: expected {known}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        text.parse::<StoreConfig>().expect_err("an error").to_string()
    }

    #[test]
    fn reads_both_kinds() {
        let StoreConfig::Posix(posix) = "file:///srv/a%20b?timeout_ms=500&max_calls=3".parse().expect("a store") else {
            panic!("not a directory")
        };
        assert_eq!((posix.path.to_str(), posix.max_calls), (Some("/srv/a b"), 3));
        assert_eq!(posix.timeout, Duration::from_millis(500));
        let text =
            "s3://layers/team/one?endpoint=http://10.0.0.1:9000&allow_http=true&path_style=true&credentials=anonymous";
        let StoreConfig::S3(s3) = text.parse().expect("a store") else { panic!("not a bucket") };
        assert_eq!((s3.bucket.as_str(), s3.region.as_str(), s3.path_style), ("layers", "us-east-1", true));
        assert_eq!(s3.prefix, Some(Key::parse("team/one").expect("a key")));
        assert_eq!(S3Store::open(s3).expect("a store").describe(), "bucket layers/team/one at http://10.0.0.1:9000");
    }

    #[test]
    fn says_what_is_wrong() {
        for (text, part) in [
            ("nonsense", "expected file:///dir"),
            ("ftp://x/y", "no store"),
            ("file://host/dir", "three slashes"),
            ("file:///d?max_calls=0", "expected a number from 1"),
            ("file:///d?colour=red", "unknown option colour: expected timeout_ms"),
            ("s3://bucket", "needs region"),
            ("s3://bucket/UP?region=r", "invalid key"),
            ("s3://bucket?region=r&region=s", "given twice"),
            ("s3://bucket?region=r&path_style=yes", "expected true or false"),
            ("s3://bucket?region=r&credentials=mine", "environment, instance or anonymous"),
        ] {
            assert!(error(text).contains(part), "{text}: {}", error(text));
        }
    }

    #[test]
    fn repeats_no_secret() {
        assert!(!error("s3://id:hunter2@bucket?region=r").contains("hunter2"));
        assert!(!error("s3://bucket?region=r&secret_access_key=hunter2").contains("hunter2"));
        let secret = S3Credentials::Static { key_id: "id".into(), secret: "hunter2".into(), token: None };
        assert!(!format!("{secret:?}").contains("hunter2"));
    }

    #[test]
    fn sends_nothing_in_the_clear_unasked() {
        let open = |text: &str| {
            let StoreConfig::S3(config) = text.parse().expect("a URL") else { panic!("not a bucket") };
            S3Store::open(config).expect_err("an error").to_string()
        };
        assert!(open("s3://bucket?endpoint=http://host").contains("allow_http=true"));
        assert!(open("s3://bucket?endpoint=https://10.0.0.1").contains("path_style=true"));
        assert!(open("s3://bucket?endpoint=https://host/path").contains("nothing else"));
        assert!(open("s3://b?region=r").contains("no name of a bucket"));
    }
}
