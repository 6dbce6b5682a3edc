//! The key of whoever starts `corral up`: made when the catalogue has none that the credentials file holds.

use crate::client::{Credentials, read_credentials, write_credentials};
use corral_gateway::Catalogue;
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::Duration;
use url::Url;

/// How this gateway is reached.
#[derive(Debug)]
pub struct Access {
    /// A key made now, to be shown once.
    pub new_key: Option<String>,
    /// The credentials file that holds URL and key.
    pub written: Option<PathBuf>,
}

impl Access {
    /// Makes sure that somebody has a key. The credentials file is kept where its key is good here, or where it is for a
    /// gateway on another machine or one that runs on this.
    ///
    /// # Errors
    /// The catalogue fails, or the file cannot be written.
    pub fn ensure(catalogue: &Catalogue, url: &str, path: anyhow::Result<PathBuf>) -> anyhow::Result<Self> {
        let path = match path {
            Ok(path) => path,
            Err(error) => {
                tracing::warn!(%error, "no place for a credentials file");
                return Self::first_key(catalogue);
            }
        };
        let kept = read_credentials(&path).unwrap_or_else(|error| {
            tracing::warn!(error = format!("{error:#}"), "the credentials file is replaced");
            None
        });
        if let Some(kept) = kept {
            if catalogue.verify(&kept.key)?.is_some() {
                if kept.url != url {
                    write_credentials(&path, &Credentials { url: url.into(), key: kept.key })?;
                }
                return Ok(Self { new_key: None, written: Some(path) });
            }
            if !is_local(&kept.url) || (kept.url != url && answers(&kept.url)) {
                tracing::warn!(path = %path.display(), url = kept.url, "the credentials file is for another gateway and stays; --credentials names another file");
                return Self::first_key(catalogue);
            }
        }
        let key = catalogue.create_key(corral_api::catalogue::DEFAULT_PROJECT, "corral up")?.key;
        write_credentials(&path, &Credentials { url: url.into(), key: key.clone() })?;
        Ok(Self { new_key: Some(key), written: Some(path) })
    }

    /// A key only if there is none yet.
    fn first_key(catalogue: &Catalogue) -> anyhow::Result<Self> {
        let project = corral_api::catalogue::DEFAULT_PROJECT;
        let new_key = match catalogue.keys(project)?.is_empty() {
            true => Some(catalogue.create_key(project, "corral up")?.key),
            false => None,
        };
        Ok(Self { new_key, written: None })
    }
}

fn is_local(url: &str) -> bool {
    let Ok(url) = Url::parse(url) else { return true };
    match url.host() {
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        Some(url::Host::Domain(name)) => name == "localhost",
        None => true,
    }
}

/// Whether something listens there now.
fn answers(url: &str) -> bool {
    const PATIENCE: Duration = Duration::from_millis(500);
    let addresses = Url::parse(url).ok().and_then(|url| url.socket_addrs(|| None).ok()).unwrap_or_default();
    addresses.iter().any(|address| TcpStream::connect_timeout(address, PATIENCE).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_made_once_and_foreign_credentials_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("credentials.json");
        let catalogue = Catalogue::in_memory().unwrap();
        let ensure = |catalogue: &Catalogue, url: &str| Access::ensure(catalogue, url, Ok(path.clone())).unwrap();
        let first = ensure(&catalogue, "http://127.0.0.1:1").new_key.unwrap();
        assert_eq!(ensure(&catalogue, "http://127.0.0.1:2").new_key, None, "the key is good: it is kept");
        let kept = read_credentials(&path).unwrap().unwrap();
        assert_eq!((kept.url.as_str(), kept.key.as_str()), ("http://127.0.0.1:2", first.as_str()));
        let other = Catalogue::in_memory().unwrap();
        assert!(ensure(&other, "http://127.0.0.1:1").new_key.is_some(), "another catalogue");
        let foreign = Credentials { url: "https://corral.example".into(), key: first };
        write_credentials(&path, &foreign).unwrap();
        let fresh = Catalogue::in_memory().unwrap();
        let access = ensure(&fresh, "http://127.0.0.1:1");
        assert!(access.new_key.is_some() && access.written.is_none());
        assert!(ensure(&fresh, "http://127.0.0.1:1").new_key.is_none());
        assert_eq!(read_credentials(&path).unwrap().unwrap(), foreign);
    }

    #[test]
    fn credentials_of_a_gateway_that_runs_here_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("credentials.json");
        let running = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", running.local_addr().unwrap());
        let other = Credentials { url, key: "key of the other".into() };
        write_credentials(&path, &other).unwrap();
        let catalogue = Catalogue::in_memory().unwrap();
        let ensure = || Access::ensure(&catalogue, "http://127.0.0.1:1", Ok(path.clone())).unwrap();
        let access = ensure();
        assert!(access.new_key.is_some() && access.written.is_none());
        assert_eq!(read_credentials(&path).unwrap().unwrap(), other);
        drop(running);
        assert!(ensure().written.is_some(), "it has ended: its credentials are worth nothing");
    }
}
