//! Images as archives: an OCI layout that is a `docker save` archive as well, so that every engine loads it.
//!
//! ```text
//! oci-layout · blobs/sha256/… (layers, configuration, manifest) · index.json · manifest.json
//! ```
//! Digests and sizes stand before the bytes they describe. So each layer is read twice, and nothing is written here;
//! equal layers give equal archives.

mod documents;
mod layer;

use crate::config::CancelFlag;
use crate::error::{ImportError, MountError};
use crate::lower::LowerView;
use crate::store::LayerStore;
use corral_api::digest::Digest;
use corral_api::image::ImageRecord;
use documents::{Blob, Documents};
use sha2::{Digest as _, Sha256};
use std::io::{self, Write};
use std::path::Path;

/// An image that is ready to be written out: everything about it is known and can be told.
pub struct Export {
    layers: Vec<(LowerView, Blob)>,
    documents: Documents,
}

impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Export").field("documents", &self.documents).finish_non_exhaustive()
    }
}

impl LayerStore {
    /// Reads an image's layers, which must be here, and holds them. Blocks.
    ///
    /// # Errors
    /// A layer is not here, has a name that means a deletion in archives, or cannot be read; `cancel` was set.
    pub fn export(&self, image: &ImageRecord, cancel: &CancelFlag) -> Result<Export, ImportError> {
        let mut layers = Vec::new();
        for record in &image.layers {
            let nothing = || ImportError::InvalidRequest(format!("layer {} holds nothing", record.digest));
            let view = LowerView::open(&[self.check(&record.digest)?])?.ok_or_else(nothing)?;
            let mut sum = Summed { out: io::sink(), hash: Sha256::new(), size: 0 };
            layer::write(&view, &mut sum, cancel)?;
            layers.push((view, Blob { digest: Digest::from_bytes(sum.hash.finalize().into()), size: sum.size }));
        }
        let blobs: Vec<Blob> = layers.iter().map(|(_, blob)| *blob).collect();
        Ok(Export { documents: Documents::of(image, &blobs), layers })
    }
}

impl Export {
    /// Writes the archive. Blocks.
    ///
    /// # Errors
    /// A layer cannot be read, `out` takes no more, or `cancel` was set.
    pub fn write_to(&self, out: impl Write, cancel: &CancelFlag) -> Result<(), ImportError> {
        let failed = |e| ImportError::io("write", Path::new("the archive"), e);
        let mut out = io::BufWriter::with_capacity(256 << 10, out);
        self.documents.write_before(&mut out).map_err(failed)?;
        for (view, blob) in &self.layers {
            out.write_all(documents::header(&blob.path(), blob.size).as_bytes()).map_err(failed)?;
            let mut sum = Summed { out: &mut out, hash: Sha256::new(), size: 0 };
            layer::write(view, &mut sum, cancel)?;
            if sum.size != blob.size {
                let changed = io::Error::other("a layer was read differently the second time");
                return Err(MountError::syscall("read", Path::new("a layer"), changed).into());
            }
            documents::pad(&mut out, blob.size).map_err(failed)?;
        }
        self.documents.write_after(&mut out).and_then(|()| out.flush()).map_err(failed)
    }
}

/// A writer that knows what went through it.
struct Summed<W> {
    out: W,
    hash: Sha256,
    size: u64,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.hash.update(&bytes[..n]);
        self.size += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
