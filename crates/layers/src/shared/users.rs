//! Who uses a store: a mark for each catalogue. A collection knows what its own catalogue needs and nothing of others,
//! so it is refused where there are any.

use super::{SharedError, SharedLayers};
use corral_store::Key;

/// Below which the marks lie: empty objects that are named as their users.
const USERS: &str = "users";

impl SharedLayers {
    /// Leaves the mark of a user, which is good as a part of a key.
    ///
    /// # Errors
    /// The store fails.
    pub async fn join(&self, user: &str) -> Result<(), SharedError> {
        let mark = Key::parse(format!("{USERS}/{user}")).map_err(SharedError::Remote)?;
        self.store.put(&mark, bytes::Bytes::new()).await.map_err(SharedError::Remote)
    }

    /// Makes sure that nobody else uses the store.
    ///
    /// # Errors
    /// Somebody does (`Others`), or the store fails.
    pub async fn ensure_alone(&self, user: &str) -> Result<(), SharedError> {
        let marks = self.all(USERS).await?;
        let mut users: Vec<String> =
            marks.iter().filter_map(|mark| mark.key.segments().last().map(str::to_owned)).collect();
        users.retain(|other| other != user);
        if users.is_empty() { Ok(()) } else { Err(SharedError::Others { users: users.join(", ") }) }
    }
}
