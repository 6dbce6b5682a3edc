//! What the result of a step depends on, as one digest.

use crate::plan::Action;
use corral_api::digest::Digest;
use serde::{Serialize, Serializer};
use serde_json::json;

/// Changes when the meaning of a key does.
const VERSION: u32 = 1;

/// A copied entry, as far as it makes a difference. Its time of change does not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Content {
    /// Where it goes, below the destination.
    #[serde(serialize_with = "name")]
    pub to: Vec<u8>,
    /// `file`, `directory` or `symlink`.
    pub kind: &'static str,
    /// Permission bits.
    pub mode: u32,
    /// Digest of a file's bytes, or of a link's target.
    pub digest: Option<Digest>,
}

/// Text as text, so that keys stay what they were; what is none as a list of bytes, which no text is equal to.
fn name<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.serialize(serializer),
        Err(_) => bytes.serialize(serializer),
    }
}

/// The key of a step: the layers below it, what it does, and what it copies.
///
/// `copied` is the content that `COPY` takes from the context; `source` are the layers of the stage or image whose
/// files it takes instead.
pub fn step(layers: &[Digest], action: &Action, copied: &[Content], source: &[Digest]) -> Digest {
    let mut action = action.clone();
    if let Action::Copy(copy) = &mut action {
        // A stage's place in the plan is not what it is: its layers are.
        if copy.from != crate::CopyFrom::Context {
            copy.from = crate::CopyFrom::Stage(0);
        }
    }
    let text = json!({"version": VERSION, "layers": layers, "action": action, "copied": copied, "source": source});
    Digest::of(text.to_string().as_bytes())
}
