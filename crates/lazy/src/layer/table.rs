//! The layers that are open, by number and by name.

use super::{Layer, LayerError};
use crate::LayerId;
use crate::server::stats::Tally;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

/// All of them.
#[derive(Debug)]
pub(crate) struct Layers {
    dir: PathBuf,
    boot_id: String,
    tally: Arc<Tally>,
    by_node: RwLock<HashMap<u64, Arc<Layer>>>,
    /// Held while one is read from the disk, so that there is never more than one of a layer. Those that were dropped
    /// here and still do something are found again.
    loading: Mutex<HashMap<LayerId, Weak<Layer>>>,
}

impl Layers {
    pub fn new(root: &Path, boot_id: String) -> Self {
        Self {
            dir: root.join("layers"),
            boot_id,
            tally: Arc::default(),
            by_node: RwLock::default(),
            loading: Mutex::default(),
        }
    }

    /// The layer of this name, as it lies on the disk now.
    pub fn find(&self, id: LayerId) -> Result<Arc<Layer>, LayerError> {
        if let Some(layer) = self.known(id.node()) {
            if layer.id != id {
                return Err(LayerError::Number { id, other: layer.id });
            }
            if layer.is_current(&self.dir)? {
                return Ok(layer);
            }
        }
        self.load(id)
    }

    /// The layer whose file has this number, and where it is known, this handle.
    pub fn find_node(&self, node: u64, handle: Option<u64>) -> Option<Arc<Layer>> {
        if let Some(layer) = self.known(node) {
            return handle.is_none_or(|h| layer.id.handle() == h).then_some(layer);
        }
        // After a restart the kernel names what only the last process knew.
        let is_it = |id: &LayerId| id.node() == node && handle.is_none_or(|h| id.handle() == h);
        let mut found: Vec<LayerId> = self.names().into_iter().filter(is_it).collect();
        let id = found.pop().filter(|_| found.is_empty())?;
        self.load(id).inspect_err(|error| tracing::warn!(%error, "a layer in use cannot be served")).ok()
    }

    /// Names of all layers on the disk, sorted.
    pub fn names(&self) -> Vec<LayerId> {
        let named = |entry: std::fs::DirEntry| {
            let name = entry.file_name();
            name.to_str().filter(|name| name.len() == 64)?.parse().ok()
        };
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let mut names: Vec<LayerId> = entries.filter_map(named).collect();
        names.sort_unstable();
        names
    }

    /// What was read of all layers that ever were in memory.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Those in memory.
    pub fn open(&self) -> Vec<Arc<Layer>> {
        let mut open: Vec<_> = self.by_node.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        open.sort_unstable_by_key(|l| l.id);
        open
    }

    /// Drops the data of a layer that lies here; says how many bytes it took.
    pub fn evict(&self, id: LayerId) -> Result<u64, LayerError> {
        let was_known = self.known(id.node()).is_some();
        let layer = self.find(id)?;
        let freed = layer.evict(&self.boot_id);
        if !was_known {
            // Read for this only. Whoever found it meanwhile finds it again.
            self.drop_node(id.node());
        }
        freed.map_err(|source| LayerError::Io { id, what: "its data cannot be dropped", source })
    }

    /// Drops what is known of a layer, or sees to it that this happens when nobody has it open.
    pub fn forget(&self, id: LayerId) {
        if let Some(layer) = self.known(id.node()).filter(|l| l.id == id) {
            layer.forgotten.store(true, Ordering::Release);
            if layer.opens.load(Ordering::Acquire) == 0 {
                self.drop_node(id.node());
            }
        }
    }

    /// The kernel has no use for a number any more.
    pub fn drop_node(&self, node: u64) {
        self.by_node.write().unwrap_or_else(PoisonError::into_inner).remove(&node);
    }

    fn known(&self, node: u64) -> Option<Arc<Layer>> {
        self.by_node.read().unwrap_or_else(PoisonError::into_inner).get(&node).cloned()
    }

    fn load(&self, id: LayerId) -> Result<Arc<Layer>, LayerError> {
        let mut loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        loading.retain(|_, layer| layer.strong_count() > 0);
        let kept = loading.get(&id).and_then(Weak::upgrade);
        let layer = match kept {
            Some(layer) if layer.is_current(&self.dir)? => {
                layer.forgotten.store(false, Ordering::Release);
                layer
            }
            _ => Arc::new(Layer::load(&self.dir, id, &self.boot_id, &self.tally)?),
        };
        loading.insert(id, Arc::downgrade(&layer));
        let mut by_node = self.by_node.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = by_node.get(&id.node()).filter(|other| other.id != id) {
            return Err(LayerError::Number { id, other: other.id });
        }
        by_node.insert(id.node(), Arc::clone(&layer));
        Ok(layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use corral_format::manifest::Manifest;

    #[test]
    fn layers_of_one_number_are_told_apart_or_refused() {
        let root = tempfile::tempdir().unwrap();
        let manifest = Manifest::new(b"meta", [(5, [1; 32])]).unwrap();
        let id: LayerId = manifest.digest().hex().parse().unwrap();
        let put = |id: LayerId| {
            let dir = root.path().join("layers").join(id.hex());
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join("manifest"), manifest.encode()).unwrap();
        };
        put(id);
        let layers = || Layers::new(root.path(), "boot".to_owned());
        assert_eq!(layers().find_node(id.node(), None).unwrap().id, id);
        assert!(layers().find_node(id.node(), Some(id.handle() ^ 1)).is_none());
        // Another name with the same number.
        let other: LayerId = format!("{}{}", &id.hex()[..16], "0".repeat(48)).parse().unwrap();
        put(other);
        assert!(layers().find_node(id.node(), None).is_none(), "it could be either");
        assert_eq!(layers().find_node(id.node(), Some(id.handle())).unwrap().id, id);
        let known = layers();
        known.find(id).unwrap();
        assert!(matches!(known.find(other), Err(LayerError::Number { .. })));
        assert!(matches!(layers().find(other), Err(LayerError::Manifest { .. })));
        std::fs::remove_dir_all(root.path().join("layers").join(id.hex())).unwrap();
        assert!(matches!(known.find(id), Err(LayerError::Unknown(_))));
    }
}
