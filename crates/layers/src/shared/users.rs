//! Who uses a store: a mark for each catalogue. A collection knows what its own catalogue needs and nothing of others,
//! so it is refused where there are any.
//!
//! The mark also tells a store from the empty directory below a mount that is missing: a node notes which stores it has
//! joined, and publishes nothing where it finds no mark of its own.

use super::{SharedError, SharedLayers};
use corral_api::digest::Digest;
use corral_store::Key;
use std::path::PathBuf;

/// Below which the marks lie: empty objects that are named as their users.
const USERS: &str = "users";
/// In the root of the local store: which stores this node has joined, one on each line.
const JOINED: &str = "joined";

/// How a store was joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Joined {
    /// As before.
    Again,
    /// For the first time: what is here already may be lacking there.
    First,
    /// Not: it was joined before, and knows nothing of that. Nothing is published there until it does.
    Astray,
}

impl SharedLayers {
    /// Leaves the mark of a user, which is good as a part of a key.
    ///
    /// # Errors
    /// The store fails, or the host.
    pub async fn join(&self, user: &str) -> Result<Joined, SharedError> {
        let mark = Key::parse(format!("{USERS}/{user}")).map_err(SharedError::Remote)?;
        let is_marked = self.store.head(&mark).await.map_err(SharedError::Remote)?.is_some();
        let store = self.store.describe();
        let text = std::fs::read_to_string(self.joined_path()).unwrap_or_default();
        let was_joined = text.lines().any(|line| line == store);
        // Set once, at the start.
        let mark = self.mark.get_or_init(|| mark);
        if was_joined && !is_marked {
            return Ok(Joined::Astray);
        }
        if !is_marked {
            self.store.put(mark, bytes::Bytes::new()).await.map_err(SharedError::Remote)?;
        }
        if !was_joined {
            let path = self.joined_path();
            std::fs::write(&path, format!("{text}{store}\n")).map_err(|e| SharedError::io("write", &path, e))?;
        }
        Ok(if is_marked { Joined::Again } else { Joined::First })
    }

    /// Where it is noted which stores were joined. Without that file, each is joined as if for the first time.
    pub fn joined_path(&self) -> PathBuf {
        self.local.root().join(JOINED)
    }

    /// Makes sure that nobody else uses the store.
    ///
    /// # Errors
    /// Somebody does (`Others`), it is not the store that was joined (`Astray`), or it fails.
    pub async fn ensure_alone(&self, user: &str) -> Result<(), SharedError> {
        self.ensure_joined().await?;
        let marks = self.all(USERS).await?;
        let mut users: Vec<String> =
            marks.iter().filter_map(|mark| mark.key.segments().last().map(str::to_owned)).collect();
        users.retain(|other| other != user);
        if users.is_empty() { Ok(()) } else { Err(SharedError::Others { users: users.join(", ") }) }
    }

    /// Makes sure that the store is the one that was joined. Nothing to look at before that.
    pub(super) async fn ensure_joined(&self) -> Result<(), SharedError> {
        let Some(mark) = self.mark.get() else { return Ok(()) };
        match self.store.head(mark).await.map_err(SharedError::Remote)? {
            Some(_) => Ok(()),
            None => Err(SharedError::Astray { store: self.store.describe() }),
        }
    }

    /// Publishes all layers that are whole here and lacking there: what was made before this store was joined. Says how
    /// many there were. One that cannot be published is left out, with a line in the log.
    ///
    /// # Errors
    /// The store cannot be listed.
    pub async fn publish_lacking(&self) -> Result<u64, SharedError> {
        let there = self.published().await?;
        let here = self.blocking(|this| {
            let mut here = this.local.list()?;
            here.retain(|layer| this.local.is_complete(&layer.digest).unwrap_or(false));
            Ok(here)
        });
        let lacking: Vec<Digest> = here.await?.iter().map(|layer| layer.digest).collect();
        let mut published = 0;
        for digest in lacking.iter().filter(|digest| there.binary_search(digest).is_err()) {
            match self.publish(digest).await {
                Ok(_) => published += 1,
                Err(error) => tracing::warn!(%digest, %error, "a layer of this node is lacking in the shared store"),
            }
        }
        Ok(published)
    }
}
