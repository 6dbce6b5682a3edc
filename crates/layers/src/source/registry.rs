//! Registries: manifest and configuration first, then the layers that are needed, a few at once, spooled to disk.
//!
//! The fetch runs on a thread with a runtime of its own, so that layers are unpacked while later ones arrive.

use super::manifest::{self, Document, MAX_DOCUMENT_BYTES, Manifest};
use super::{Content, OpenedImage, RegistryAuth, SourceLayer, layout};
use crate::config::{CancelFlag, ImportOptions, LayersConfig, ProgressFn};
use crate::error::ImportError;
use corral_api::digest::Digest;
use corral_api::image::ImportProgress;
use futures_util::StreamExt;
use oci_client::client::{Client, ClientConfig, ClientProtocol};
use oci_client::errors::{DigestError, OciDistributionError, OciErrorCode};
use oci_client::manifest::OciDescriptor;
use oci_client::{Reference, secrets};
use std::collections::HashMap;
use std::fs::File;
use std::future::Future;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::runtime::Runtime;

const ACCEPTED: &[&str] = &[
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// Longest silence while a body is read.
const READ_LIMIT: Duration = Duration::from_secs(60);
/// How often a layer whose transfer broke off is begun anew.
const ATTEMPTS: u32 = 3;
const CANCEL_POLL: Duration = Duration::from_millis(50);

/// Bytes between two lines of progress of one layer.
const REPORT_EVERY: u64 = 4 << 20;

enum Event {
    Bytes { layer: usize, bytes: u64 },
    Done { layer: usize, result: Result<PathBuf, ImportError> },
}

struct Access {
    client: Client,
    reference: Reference,
    auth: secrets::RegistryAuth,
    /// The reference as asked for.
    text: String,
    concurrent: usize,
}

enum State {
    Idle(Runtime, Box<Access>),
    Fetching { events: mpsc::Receiver<Event>, thread: Option<JoinHandle<()>>, done: HashMap<usize, PathBuf> },
    Spent,
}

/// The layers of a registry image, fetched when asked for. Dropping it ends the fetch.
pub(crate) struct Remote {
    state: State,
    work: PathBuf,
    stop: CancelFlag,
}

impl Remote {
    pub(crate) fn fetch_from(&mut self, first: usize, layers: &[SourceLayer]) -> Result<(), ImportError> {
        let (runtime, access) = match std::mem::replace(&mut self.state, State::Spent) {
            State::Idle(runtime, access) => (runtime, access),
            other => {
                self.state = other;
                return Ok(());
            }
        };
        let wanted: Vec<_> = layers.iter().cloned().enumerate().skip(first).collect();
        let (sender, events) = mpsc::channel();
        let (work, stop) = (self.work.clone(), self.stop.clone());
        let spawned = std::thread::Builder::new().name("layer-fetch".to_owned()).spawn(move || {
            runtime.block_on(fetch_all(&access, wanted, &work, &stop, &sender));
        });
        let thread = spawned.map_err(|e| ImportError::io("start a thread for", &self.work, e))?;
        self.state = State::Fetching { events, thread: Some(thread), done: HashMap::new() };
        Ok(())
    }

    /// Waits for a layer, reporting what arrives meanwhile.
    pub(crate) fn wait_for(
        &mut self,
        index: usize,
        cancel: &CancelFlag,
        progress: ProgressFn<'_>,
    ) -> Result<PathBuf, ImportError> {
        let State::Fetching { events, done, .. } = &mut self.state else {
            return Err(ImportError::InvalidRequest("layer was not fetched".to_owned()));
        };
        loop {
            if let Some(path) = done.remove(&index) {
                return Ok(path);
            }
            if cancel.is_cancelled() {
                return Err(ImportError::Cancelled);
            }
            match events.recv_timeout(CANCEL_POLL) {
                Ok(Event::Bytes { layer, bytes }) => {
                    let layer = u32::try_from(layer).unwrap_or(u32::MAX);
                    progress(ImportProgress::Fetched { layer, bytes });
                }
                Ok(Event::Done { layer, result }) => {
                    done.insert(layer, result?);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    let gone = std::io::Error::other("the fetching thread ended early");
                    return Err(ImportError::io("fetch into", &self.work, gone));
                }
            }
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.stop.cancel();
        if let State::Fetching { thread, .. } = &mut self.state
            && let Some(thread) = thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the fetching thread panicked");
        }
    }
}

/// Logs in, reads manifest and configuration.
pub(crate) fn open(
    text: &str,
    auth: &RegistryAuth,
    plain_http: bool,
    options: &ImportOptions,
    config: &LayersConfig,
    work: &Path,
    cancel: &CancelFlag,
) -> Result<OpenedImage, ImportError> {
    let reference = Reference::try_from(text)
        .map_err(|e| ImportError::InvalidRequest(format!("{text:?} is not an image reference: {e}")))?;
    let host = reference.resolve_registry();
    if plain_http && !is_loopback(host) && !config.plain_http_hosts.iter().any(|h| h == host) {
        return Err(ImportError::InvalidRequest(format!("{host} may not be spoken to without TLS")));
    }
    let protocol = if plain_http { ClientProtocol::Http } else { ClientProtocol::Https };
    let client_config = ClientConfig {
        protocol,
        connect_timeout: Some(CONNECT_LIMIT),
        read_timeout: Some(READ_LIMIT),
        user_agent: concat!("corral/", env!("CARGO_PKG_VERSION")),
        ..ClientConfig::default()
    };
    let client = Client::try_from(client_config).map_err(|e| failed(text, e))?;
    let auth = match auth {
        RegistryAuth::Anonymous => secrets::RegistryAuth::Anonymous,
        RegistryAuth::Basic { username, password } => secrets::RegistryAuth::Basic(username.clone(), password.clone()),
    };
    let concurrent = config.concurrent_fetches.max(1);
    let access = Access { client, reference, auth, text: text.to_owned(), concurrent };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| ImportError::io("start a runtime for", work, e))?;
    let (manifest, source_digest, config_bytes) = runtime.block_on(or_cancelled(cancel, access.describe(options)))?;
    let (config, platform, diff_ids) = manifest::config(&config_bytes, text)?;
    let layers = manifest::layers(&manifest, &diff_ids, text, |_, _| Ok(Content::Remote))?;
    let remote =
        Remote { state: State::Idle(runtime, Box::new(access)), work: work.to_owned(), stop: CancelFlag::new() };
    let name = text.to_owned();
    Ok(OpenedImage { name, config, platform, source_digest: Some(source_digest), layers, remote: Some(remote) })
}

impl Access {
    /// The manifest for the platform, its digest, and the configuration's bytes.
    async fn describe(&self, options: &ImportOptions) -> Result<(Manifest, String, Vec<u8>), ImportError> {
        let mut reference = self.reference.clone();
        for _ in 0..4 {
            let (bytes, digest) = self
                .client
                .pull_manifest_raw(&reference, &self.auth, ACCEPTED)
                .await
                .map_err(|e| failed(&self.text, e))?;
            if bytes.len() as u64 > MAX_DOCUMENT_BYTES {
                return Err(ImportError::TooLarge { source_name: self.text.clone(), limit: MAX_DOCUMENT_BYTES });
            }
            match manifest::document(&bytes, "", &self.text)? {
                Document::Index(index) => {
                    let by_platform = ImportOptions { select: None, ..options.clone() };
                    let picked = manifest::pick(&index, &by_platform, &self.text)?;
                    manifest::digest(&picked.digest, &self.text)?;
                    reference = reference.clone_with_digest(picked.digest.clone());
                }
                Document::Manifest(manifest) => {
                    let name = format!("{}: configuration", self.text);
                    if manifest.config.size > MAX_DOCUMENT_BYTES {
                        return Err(ImportError::TooLarge { source_name: name, limit: MAX_DOCUMENT_BYTES });
                    }
                    let expected = manifest::digest(&manifest.config.digest, &name)?;
                    let mut bytes = Vec::new();
                    self.stream(&expected, manifest.config.size, &name, |chunk| {
                        bytes.extend_from_slice(chunk);
                        Ok(())
                    })
                    .await?;
                    layout::check(&bytes, &expected, manifest.config.size, &name)?;
                    return Ok((manifest, digest, bytes));
                }
            }
        }
        let reason = "indexes nested more than 4 deep".to_owned();
        Err(ImportError::Manifest { source_name: self.text.clone(), reason })
    }

    /// Streams a blob to a sink, never more than its size. The client checks its digest.
    async fn stream(
        &self,
        digest: &Digest,
        size: u64,
        name: &str,
        mut sink: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> Result<(), ImportError> {
        let descriptor = OciDescriptor {
            digest: digest.to_string(),
            size: i64::try_from(size).unwrap_or(i64::MAX),
            ..OciDescriptor::default()
        };
        let blob = self.client.pull_blob_stream(&self.reference, &descriptor).await;
        let mut stream = blob.map_err(|e| failed(&self.text, e))?.stream;
        let mut bytes = 0u64;
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(|e| self.broken(e, name))?;
            bytes += chunk.len() as u64;
            if bytes > size {
                return Err(ImportError::SizeMismatch { source_name: name.to_owned(), expected: size, actual: bytes });
            }
            sink(&chunk).map_err(|e| ImportError::io("spool", name, e))?;
        }
        if bytes != size {
            return Err(ImportError::SizeMismatch { source_name: name.to_owned(), expected: size, actual: bytes });
        }
        Ok(())
    }

    fn broken(&self, e: std::io::Error, name: &str) -> ImportError {
        if let Some(DigestError::VerificationError { expected, actual }) =
            e.get_ref().and_then(|inner| inner.downcast_ref::<DigestError>())
            && let (Ok(expected), Ok(actual)) = (expected.parse(), actual.parse())
        {
            return ImportError::DigestMismatch { source_name: name.to_owned(), expected, actual };
        }
        failed(&self.text, OciDistributionError::IoError(e))
    }

    async fn fetch(
        &self,
        index: usize,
        layer: &SourceLayer,
        work: &Path,
        events: &mpsc::Sender<Event>,
    ) -> Result<PathBuf, ImportError> {
        let path = work.join(format!("layer-{index}"));
        let (Some(digest), Some(size)) = (layer.digest, layer.size) else {
            return Err(ImportError::InvalidRequest(format!("{}: no descriptor", layer.name)));
        };
        let mut attempt = 1;
        loop {
            let mut file = File::create(&path).map_err(|e| ImportError::io("make", &path, e))?;
            let (mut bytes, mut reported) = (0, 0);
            let sink = |chunk: &[u8]| {
                bytes += chunk.len() as u64;
                if bytes >= reported + REPORT_EVERY || bytes == size {
                    reported = bytes;
                    // Nobody listens any more once the import has failed.
                    drop(events.send(Event::Bytes { layer: index, bytes }));
                }
                file.write_all(chunk)
            };
            match self.stream(&digest, size, &layer.name, sink).await {
                Ok(()) => return Ok(path),
                Err(e @ ImportError::Registry { .. }) if attempt < ATTEMPTS => {
                    tracing::info!(layer = %layer.name, attempt, error = %e, "transfer broke off; begun anew");
                    attempt += 1;
                }
                Err(e) => return Err(e),
            }
        }
    }
}

async fn fetch_all(
    access: &Access,
    wanted: Vec<(usize, SourceLayer)>,
    work: &Path,
    stop: &CancelFlag,
    events: &mpsc::Sender<Event>,
) {
    let fetches = wanted.iter().map(|(index, layer)| async move {
        let result = or_cancelled(stop, access.fetch(*index, layer, work, events)).await;
        (*index, result)
    });
    let mut fetches = futures_util::stream::iter(fetches).buffer_unordered(access.concurrent);
    while let Some((layer, result)) = fetches.next().await {
        let failed = result.is_err();
        if events.send(Event::Done { layer, result }).is_err() || failed {
            return;
        }
    }
}

/// Runs a future until it is done or the flag is set.
async fn or_cancelled<T>(
    flag: &CancelFlag,
    work: impl Future<Output = Result<T, ImportError>>,
) -> Result<T, ImportError> {
    let cancelled = async {
        while !flag.is_cancelled() {
            tokio::time::sleep(CANCEL_POLL).await;
        }
    };
    tokio::select! {
        result = work => result,
        () = cancelled => Err(ImportError::Cancelled),
    }
}

/// Sorts the client's errors by what a caller can do about them.
fn failed(reference: &str, e: OciDistributionError) -> ImportError {
    let reference = reference.to_owned();
    let by_code = |code: &OciErrorCode| match code {
        OciErrorCode::Unauthorized | OciErrorCode::Denied => Some(true),
        OciErrorCode::ManifestUnknown
        | OciErrorCode::NameUnknown
        | OciErrorCode::NotFound
        | OciErrorCode::BlobUnknown => Some(false),
        _ => None,
    };
    let unauthorized = match &e {
        OciDistributionError::UnauthorizedError { .. } | OciDistributionError::AuthenticationFailure(_) => Some(true),
        OciDistributionError::ImageManifestNotFoundError(_) => Some(false),
        OciDistributionError::ServerError { code: 401 | 403, .. } => Some(true),
        OciDistributionError::ServerError { code: 404, .. } => Some(false),
        OciDistributionError::RegistryError { envelope, .. } => envelope.errors.iter().find_map(|e| by_code(&e.code)),
        OciDistributionError::DigestError(DigestError::VerificationError { expected, actual }) => {
            if let (Ok(expected), Ok(actual)) = (expected.parse(), actual.parse()) {
                return ImportError::DigestMismatch { source_name: reference, expected, actual };
            }
            None
        }
        _ => None,
    };
    match unauthorized {
        Some(true) => ImportError::RegistryUnauthorized { reference },
        Some(false) => ImportError::RegistryNotFound { reference },
        None => ImportError::Registry { reference, source: Box::new(e) },
    }
}

fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_loopback() {
        for host in ["localhost", "localhost:5000", "127.0.0.1:5000", "127.8.9.1", "[::1]:5000"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["example.com", "localhost.example.com", "10.0.0.1:5000", "127.0.0.1.example.com", "[::2]:1"] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
