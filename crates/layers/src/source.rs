//! Image sources: each is opened into a configuration and a list of layers whose bytes can be read in order.

mod archive;
mod layout;
mod manifest;
mod registry;

use crate::config::{CancelFlag, ImportOptions, LayersConfig, ProgressFn};
use crate::error::ImportError;
use crate::stream::Codec;
use corral_api::digest::Digest;
use corral_api::image::ImageConfig;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Where an image comes from.
#[derive(Debug, Clone)]
pub enum ImageSource {
    /// A registry speaking the OCI distribution protocol.
    Registry {
        /// `host[:port]/repository[:tag][@digest]`.
        reference: String,
        /// How to log in.
        auth: RegistryAuth,
        /// Speak HTTP without TLS; only for loopback and hosts the operator named.
        plain_http: bool,
    },
    /// What `docker save` writes, or an OCI layout as a tar; plain or compressed as a whole with gzip or zstd.
    Archive(PathBuf),
    /// An OCI image layout directory.
    OciLayout(PathBuf),
    /// A root file system as a tar, plain or compressed with gzip or zstd.
    RootfsTar(PathBuf),
    /// A root file system as a directory of the host.
    RootfsDir(PathBuf),
}

/// How to log in to a registry.
#[derive(Clone, Default)]
pub enum RegistryAuth {
    /// Not at all.
    #[default]
    Anonymous,
    /// With a name and a password or token.
    Basic {
        /// Name.
        username: String,
        /// Password or token.
        password: String,
    },
}

impl std::fmt::Debug for RegistryAuth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Anonymous => f.write_str("Anonymous"),
            Self::Basic { username, .. } => f.debug_struct("Basic").field("username", username).finish_non_exhaustive(),
        }
    }
}

/// Where a layer's bytes lie.
#[derive(Debug, Clone)]
pub(crate) enum Content {
    File(PathBuf),
    Slice {
        path: PathBuf,
        offset: u64,
        len: u64,
    },
    Directory(PathBuf),
    /// Fetched on demand.
    Remote,
}

/// One layer of a source.
#[derive(Debug, Clone)]
pub(crate) struct SourceLayer {
    /// For messages.
    pub(crate) name: String,
    pub(crate) content: Content,
    /// How it is compressed; recognised from its bytes where the source does not say.
    pub(crate) codec: Option<Codec>,
    pub(crate) size: Option<u64>,
    pub(crate) digest: Option<Digest>,
    pub(crate) diff_id: Option<Digest>,
    pub(crate) whiteouts: bool,
}

/// An image ready to be read.
pub(crate) struct OpenedImage {
    pub(crate) name: String,
    pub(crate) config: ImageConfig,
    pub(crate) platform: String,
    pub(crate) source_digest: Option<String>,
    pub(crate) layers: Vec<SourceLayer>,
    remote: Option<registry::Remote>,
}

/// Bytes of a layer on this host.
pub(crate) struct Local {
    content: Content,
    /// Whether the file was fetched for this import only.
    spooled: bool,
}

impl Local {
    pub(crate) fn open(&self) -> Result<Box<dyn Read>, ImportError> {
        match &self.content {
            Content::File(path) => Ok(Box::new(File::open(path).map_err(|e| ImportError::source(path, e))?)),
            Content::Slice { path, offset, len } => {
                let io = |e| ImportError::source(path, e);
                let mut file = File::open(path).map_err(io)?;
                file.seek(SeekFrom::Start(*offset)).map_err(io)?;
                Ok(Box::new(file.take(*len)))
            }
            Content::Directory(path) => Err(ImportError::UnknownFormat {
                source_name: path.display().to_string(),
                wanted: "a file",
                found: "it is a directory".to_owned(),
            }),
            Content::Remote => Err(ImportError::InvalidRequest("layer was not fetched".to_owned())),
        }
    }

    /// Frees the disk of a fetched layer as soon as it is applied.
    pub(crate) fn discard(self) -> Result<(), ImportError> {
        match self.content {
            Content::File(path) if self.spooled => {
                std::fs::remove_file(&path).map_err(|e| ImportError::io("remove", path, e))
            }
            _ => Ok(()),
        }
    }
}

impl OpenedImage {
    /// Begins fetching the layers from this one on, where they are remote and not yet being fetched.
    pub(crate) fn fetch_from(&mut self, first: usize) -> Result<(), ImportError> {
        match &mut self.remote {
            Some(remote) => remote.fetch_from(first, &self.layers),
            None => Ok(()),
        }
    }

    /// The bytes of a layer; waits for them where they are being fetched.
    pub(crate) fn content(
        &mut self,
        index: usize,
        cancel: &CancelFlag,
        progress: ProgressFn<'_>,
    ) -> Result<Local, ImportError> {
        match (&self.layers[index].content, &mut self.remote) {
            (Content::Remote, Some(remote)) => {
                Ok(Local { content: Content::File(remote.wait_for(index, cancel, progress)?), spooled: true })
            }
            (content, _) => Ok(Local { content: content.clone(), spooled: false }),
        }
    }
}

/// Opens a source; `work` takes spooled files and is removed by the caller.
pub(crate) fn open(
    source: &ImageSource,
    options: &ImportOptions,
    config: &LayersConfig,
    work: &Path,
    cancel: &CancelFlag,
) -> Result<OpenedImage, ImportError> {
    let opened = match source {
        ImageSource::Registry { reference, auth, plain_http } => {
            registry::open(reference, auth, *plain_http, options, config, work, cancel)
        }
        ImageSource::Archive(path) => archive::open(path, options, work, cancel),
        ImageSource::OciLayout(path) => layout::open(&layout::Directory::new(path), options, options.shown(path)),
        ImageSource::RootfsTar(path) => Ok(rootfs(path, Content::File(path.clone()), options)),
        ImageSource::RootfsDir(path) => Ok(rootfs(path, Content::Directory(path.clone()), options)),
    }?;
    if fits(&opened.platform, &options.platform) {
        return Ok(opened);
    }
    let platform = format!("{}: it is for {}", options.platform, opened.platform);
    Err(ImportError::NoPlatform { source_name: opened.name, platform })
}

/// Whether an image's platform is the one asked for. A variant counts where both name one.
fn fits(found: &str, wanted: &str) -> bool {
    let parts = |text: &str| text.split('/').map(str::to_owned).collect::<Vec<_>>();
    let (found, wanted) = (parts(found), parts(wanted));
    wanted.len() >= 2 && wanted.iter().all(|w| !w.is_empty()) && found.iter().zip(&wanted).all(|(f, w)| f == w)
}

fn rootfs(path: &Path, content: Content, options: &ImportOptions) -> OpenedImage {
    let name = options.shown(path);
    let layer = SourceLayer {
        name: name.clone(),
        content,
        codec: None,
        size: None,
        digest: None,
        diff_id: None,
        whiteouts: false,
    };
    let mut config = options.config.clone();
    if config.workdir.is_empty() {
        "/".clone_into(&mut config.workdir);
    }
    let platform = options.platform.clone();
    OpenedImage { name, config, platform, source_digest: None, layers: vec![layer], remote: None }
}
