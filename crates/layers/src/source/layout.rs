//! OCI image layouts, in a directory or in a tar.

use super::manifest::{self, Descriptor, Document, MAX_DOCUMENT_BYTES, Manifest};
use super::{Content, Local, OpenedImage};
use crate::config::ImportOptions;
use crate::error::ImportError;
use corral_api::digest::Digest;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Indexes within indexes that are followed.
const MAX_NESTING: usize = 4;

/// A place that has named blobs.
pub(crate) trait Blobs {
    /// Where a file of the layout lies; `None` where there is none.
    fn find(&self, name: &str) -> Result<Option<Content>, ImportError>;
}

/// A layout directory.
pub(crate) struct Directory {
    root: PathBuf,
}

impl Directory {
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }
}

impl Blobs for Directory {
    fn find(&self, name: &str) -> Result<Option<Content>, ImportError> {
        let path = self.root.join(name);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(CWD, &self.root, flags, Mode::empty());
        let root = root.map_err(|e| ImportError::source(&self.root, e))?;
        // Nothing in a layout may be a link: it would read a file of the host.
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        match rustix::fs::openat2(&root, name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve) {
            Ok(_) => Ok(Some(Content::File(path))),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(e) => Err(ImportError::io("open", path, e)),
        }
    }
}

/// Opens a layout.
pub(crate) fn open(blobs: &impl Blobs, options: &ImportOptions, name: String) -> Result<OpenedImage, ImportError> {
    let Some(index) = blobs.find("index.json")? else {
        let (wanted, found) = ("an OCI layout", "it has no index.json".to_owned());
        return Err(ImportError::UnknownFormat { source_name: name, wanted, found });
    };
    let bytes = read(&index, MAX_DOCUMENT_BYTES, &format!("{name}: index.json"))?;
    let document =
        manifest::document(&bytes, "application/vnd.oci.image.index.v1+json", &format!("{name}: index.json"))?;
    let (manifest, source_digest) = descend(blobs, document, options, &name)?;
    let config_bytes = blob(blobs, &manifest.config, &format!("{name}: configuration"))?;
    let (config, platform, diff_ids) = manifest::config(&config_bytes, &name)?;
    let layers = manifest::layers(&manifest, &diff_ids, &name, |digest, _| {
        let file = blob_name(digest);
        blobs.find(&file)?.ok_or_else(|| missing(&name, &file))
    })?;
    Ok(OpenedImage { name, config, platform, source_digest, layers, remote: None })
}

fn descend(
    blobs: &impl Blobs,
    mut document: Document,
    options: &ImportOptions,
    name: &str,
) -> Result<(Manifest, Option<String>), ImportError> {
    let mut options = options.clone();
    let mut digest = None;
    for _ in 0..MAX_NESTING {
        let index = match document {
            Document::Manifest(manifest) => return Ok((manifest, digest)),
            Document::Index(index) => index,
        };
        let picked = manifest::pick(&index, &options, name)?;
        // A name selects among the images of a layout; below it only the platform is left to choose.
        options.select = None;
        let label = format!("{name}: manifest {}", picked.digest);
        document = manifest::document(&blob(blobs, picked, &label)?, &picked.media_type, &label)?;
        digest = Some(picked.digest.clone());
    }
    let reason = format!("indexes nested more than {MAX_NESTING} deep");
    Err(ImportError::Manifest { source_name: name.to_owned(), reason })
}

fn blob_name(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

fn missing(name: &str, file: &str) -> ImportError {
    ImportError::Manifest { source_name: name.to_owned(), reason: format!("{file} is missing") }
}

/// Reads a small blob and checks its size and digest.
fn blob(blobs: &impl Blobs, descriptor: &Descriptor, name: &str) -> Result<Vec<u8>, ImportError> {
    let digest = manifest::digest(&descriptor.digest, name)?;
    let file = blob_name(&digest);
    let content = blobs.find(&file)?.ok_or_else(|| missing(name, &file))?;
    let bytes = read(&content, MAX_DOCUMENT_BYTES, name)?;
    check(&bytes, &digest, descriptor.size, name)?;
    Ok(bytes)
}

/// Compares a small blob with its descriptor.
pub(crate) fn check(bytes: &[u8], expected: &Digest, size: u64, name: &str) -> Result<(), ImportError> {
    let source_name = name.to_owned();
    if bytes.len() as u64 != size {
        return Err(ImportError::SizeMismatch { source_name, expected: size, actual: bytes.len() as u64 });
    }
    let actual = Digest::of(bytes);
    if actual != *expected {
        return Err(ImportError::DigestMismatch { source_name, expected: *expected, actual });
    }
    Ok(())
}

/// Reads a small file of a layout.
pub(crate) fn read(content: &Content, limit: u64, name: &str) -> Result<Vec<u8>, ImportError> {
    let mut bytes = Vec::new();
    let local = Local { content: content.clone(), spooled: false };
    local.open()?.take(limit + 1).read_to_end(&mut bytes).map_err(|e| ImportError::io("read", name, e))?;
    if bytes.len() as u64 > limit {
        return Err(ImportError::TooLarge { source_name: name.to_owned(), limit });
    }
    Ok(bytes)
}
