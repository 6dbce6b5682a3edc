//! Whether a service keeps to the condition that creating writes rest on: tried once, before the first of each kind.

use super::{S3Store, answers};
use crate::error::{ErrorKind, StoreError};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{ObjectStore, PutMode, PutOptions, PutPayload};
use tokio::sync::OnceCell;

/// An object that stays, so that later probes are one request. No key begins with a dot.
const NAME: &str = ".corral-probe";

/// What was found so far.
#[derive(Debug, Default)]
pub(super) struct Probes {
    single: OnceCell<()>,
    upload: OnceCell<()>,
}

impl S3Store {
    /// Makes sure that a put can be conditional.
    pub(super) async fn ensure_conditional(&self) -> Result<(), StoreError> {
        self.probes.single.get_or_try_init(|| self.probe_single()).await.copied()
    }

    /// Makes sure that the completion of an upload can be conditional.
    pub(super) async fn ensure_conditional_upload(&self) -> Result<(), StoreError> {
        self.ensure_conditional().await?;
        self.probes.upload.get_or_try_init(|| self.probe_upload()).await.copied()
    }

    async fn probe_single(&self) -> Result<(), StoreError> {
        let path = Path::from(self.name_of(NAME));
        // The first makes the object where it is missing; the second must then be refused.
        for _ in 0..2 {
            let payload = PutPayload::from_static(b"made to see whether this service heeds If-None-Match\n");
            let options = PutOptions::from(PutMode::Create);
            match self.call("probe", NAME, self.client.put_opts(&path, payload, options)).await {
                Ok(_) => {}
                Err(error) if answers::is_taken(&error) => return Ok(()),
                Err(error) => return Err(explain(error, "PutObject")),
            }
        }
        Err(lacking("PutObject"))
    }

    async fn probe_upload(&self) -> Result<(), StoreError> {
        let path = Path::from(self.name_of(NAME));
        let id = self.call("probe", NAME, self.client.create_multipart(&path)).await?;
        let done = async {
            let part = self.client.put_part(&path, &id, 0, PutPayload::from_static(b"x\n")).await?;
            self.client.complete_multipart(&path, &id, vec![part]).await
        };
        match self.call("probe", NAME, done).await {
            Ok(_) => Err(lacking("CompleteMultipartUpload")),
            Err(error) => {
                let aborted = self.call("probe", NAME, self.client.abort_multipart(&path, &id)).await;
                if let Err(error) = aborted {
                    tracing::debug!(%error, "the upload of a probe stays");
                }
                if answers::is_taken(&error) { Ok(()) } else { Err(explain(error, "CompleteMultipartUpload")) }
            }
        }
    }
}

/// A refusal of the header itself is the same lack.
fn explain(error: StoreError, request: &str) -> StoreError {
    if error.kind() == ErrorKind::Unsupported { lacking(request) } else { error }
}

fn lacking(request: &str) -> StoreError {
    StoreError::Unsupported {
        what: format!(
            "this service does not heed 'If-None-Match: *' of {request}, so writers could replace each other's objects; \
             use one that does (AWS S3, MinIO, Ceph RGW and R2 do in recent versions), or a shared directory"
        ),
    }
}
