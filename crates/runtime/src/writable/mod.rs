//! Writable layers with hard quotas: one btrfs subvolume each, holding the overlay's upper and work directories.
//!
//! Where the data directory lies on btrfs the subvolumes are made there; elsewhere in a btrfs image beside it, mounted
//! through a loop device. The image's blocks are allocated ahead, so that a full host filesystem makes creates fail
//! instead of turning the image read-only, and it grows in steps while the host has more than a reserve to spare.

mod image;

use crate::RuntimeError;
use corral_sys::btrfs::{self, QuotaMode};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Settings of the store of writable layers.
#[derive(Debug, Clone)]
pub struct WritableConfig {
    /// First size of the image, and the step it grows by.
    pub step_bytes: u64,
    /// Free space of the host's filesystem that is never taken.
    pub reserve_bytes: u64,
    /// Free space in the store below which it grows, or refuses creates when it cannot.
    pub low_water_bytes: u64,
}

impl Default for WritableConfig {
    fn default() -> Self {
        Self::of(8 << 30, 4 << 30)
    }
}

impl WritableConfig {
    /// Settings that follow from the step and the reserve.
    pub fn of(step_bytes: u64, reserve_bytes: u64) -> Self {
        Self { step_bytes, reserve_bytes, low_water_bytes: step_bytes / 4 }
    }
}

/// The store.
#[derive(Debug)]
pub struct WritableStore {
    root: PathBuf,
    root_fd: OwnedFd,
    config: WritableConfig,
    /// The image, where there is one.
    image: Option<image::Image>,
    /// Quota groups of removed subvolumes that the kernel still holds.
    leftover: Mutex<Vec<u64>>,
}

/// Space in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Size.
    pub total_bytes: u64,
    /// Free.
    pub free_bytes: u64,
}

/// How names of snapshots begin that are only needed for a moment. No sandbox's id begins so.
pub const TEMPORARY: &str = "tmp-";

const BTRFS_MAGIC: i64 = 0x9123_683E;

fn is_btrfs(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|s| s.f_type == BTRFS_MAGIC)
}

impl WritableStore {
    /// Opens the store in a data directory, making what is missing. Blocks.
    ///
    /// # Errors
    /// When neither btrfs nor an image on it can be had, or the host's disk is too full.
    pub fn open(data_dir: &Path, config: WritableConfig) -> Result<Self, RuntimeError> {
        let root = data_dir.join("writable");
        std::fs::create_dir_all(&root).map_err(|e| RuntimeError::host("make", &root, e))?;
        let image_path = data_dir.join("writable.btrfs");
        let image = if image_path.exists() || !is_btrfs(&root) {
            Some(image::Image::ensure_mounted(&image_path, &root, &config)?)
        } else {
            None
        };
        let root_fd = openat(CWD, &root, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| RuntimeError::host("open", &root, e))?;
        ensure_quota(&root_fd, &root)?;
        let store = Self { root, root_fd, config, image, leftover: Mutex::new(Vec::new()) };
        // Of a process that died while it used them.
        for name in store.list()?.iter().filter(|name| name.starts_with(TEMPORARY)) {
            store.remove(name)?;
        }
        Ok(store)
    }

    /// Directory of a sandbox's writable layer.
    pub fn path_of(&self, sandbox: &str) -> PathBuf {
        self.root.join(sandbox)
    }

    /// Makes a sandbox's writable layer with its quota and opens it: empty, or as the writable layer or snapshot `from`
    /// is now. On failure nothing is left.
    ///
    /// # Errors
    /// When the store is full or the kernel refuses.
    pub fn create(&self, sandbox: &str, bytes: u64, from: Option<&str>) -> Result<OwnedFd, RuntimeError> {
        let path = self.path_of(sandbox);
        let failed = |action: &'static str| {
            let path = path.clone();
            move |e: Errno| RuntimeError::host(action, path, e)
        };
        match from {
            None => btrfs::create_subvolume(self.root_fd.as_fd(), sandbox).map_err(failed("make the subvolume"))?,
            Some(from) => self.snapshot(from, sandbox)?,
        }
        let made = (|| {
            let dir =
                openat(&self.root_fd, sandbox, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
                    .map_err(failed("open"))?;
            let id = btrfs::subvolume_id(dir.as_fd()).map_err(failed("identify"))?;
            btrfs::limit_subvolume(self.root_fd.as_fd(), id, bytes).map_err(failed("limit"))?;
            if from.is_some() {
                // It tells that another overlay uses it, and which files of it were on their way.
                let work = path.join("work");
                std::fs::remove_dir_all(&work).map_err(|e| RuntimeError::host("empty", &work, e))?;
            }
            let missing: &[&str] = if from.is_some() { &["work"] } else { &["upper", "work"] };
            for name in missing {
                rustix::fs::mkdirat(&dir, *name, Mode::from_raw_mode(0o755)).map_err(failed("make a directory in"))?;
            }
            Ok(dir)
        })();
        if made.is_err() {
            self.remove(sandbox)?;
        }
        made
    }

    /// Makes `name` a copy of a writable layer as it is now. Blocks for milliseconds, whatever its size: blocks are
    /// shared until one side writes.
    ///
    /// # Errors
    /// When there is no such layer, or the kernel refuses.
    pub fn snapshot(&self, of: &str, name: &str) -> Result<(), RuntimeError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let source = openat(&self.root_fd, of, flags, Mode::empty())
            .map_err(|e| RuntimeError::host("open", self.path_of(of), e))?;
        btrfs::create_snapshot(self.root_fd.as_fd(), name, source.as_fd())
            .map_err(|e| RuntimeError::host("make the snapshot", self.path_of(name), e))
    }

    /// Where the overlay's upper directory of a writable layer or snapshot lies.
    pub fn upper_of(&self, name: &str) -> PathBuf {
        self.path_of(name).join("upper")
    }

    /// Removes a sandbox's writable layer. Idempotent; space is freed in the background.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn remove(&self, sandbox: &str) -> Result<(), RuntimeError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let id = match openat(&self.root_fd, sandbox, flags, Mode::empty()) {
            Ok(dir) => btrfs::subvolume_id(dir.as_fd()).ok(),
            Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(RuntimeError::host("open", self.path_of(sandbox), e)),
        };
        match btrfs::remove_subvolume(self.root_fd.as_fd(), sandbox) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => return Err(RuntimeError::host("remove the subvolume", self.path_of(sandbox), e)),
        }
        if let Some(id) = id {
            self.lock_leftover().push(id);
        }
        Ok(())
    }

    fn lock_leftover(&self) -> std::sync::MutexGuard<'_, Vec<u64>> {
        self.leftover.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Removes quota groups of subvolumes that the kernel has finished cleaning. Called now and then; blocks shortly.
    pub fn sweep_quota_groups(&self) {
        /// Tries a call, so that the filesystem's transactions are not held up.
        const BATCH: usize = 64;
        let batch: Vec<u64> = {
            let mut leftover = self.lock_leftover();
            let keep = leftover.len().saturating_sub(BATCH);
            leftover.split_off(keep)
        };
        let mut again = Vec::new();
        for id in batch {
            if let Err(Errno::BUSY) = btrfs::remove_quota_group(self.root_fd.as_fd(), id) {
                again.push(id);
            }
        }
        // Others first next time.
        self.lock_leftover().splice(0..0, again);
    }

    /// Bytes a sandbox's writable layer uses, as of the filesystem's last transaction.
    pub fn usage(&self, sandbox: &str) -> u64 {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat(&self.root_fd, sandbox, flags, Mode::empty())
            .and_then(|dir| btrfs::subvolume_id(dir.as_fd()))
            .and_then(|id| btrfs::subvolume_usage(self.root_fd.as_fd(), id))
            .unwrap_or(0)
    }

    /// Names of all writable layers.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn list(&self) -> Result<Vec<String>, RuntimeError> {
        let entries = std::fs::read_dir(&self.root).map_err(|e| RuntimeError::host("read", &self.root, e))?;
        Ok(entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect())
    }

    /// Size and free space.
    pub fn space(&self) -> Space {
        rustix::fs::fstatvfs(&self.root_fd).map_or(Space { total_bytes: 0, free_bytes: 0 }, |s| Space {
            total_bytes: s.f_blocks * s.f_frsize,
            free_bytes: s.f_bavail * s.f_frsize,
        })
    }

    /// Grows the image when it runs low. Called now and then and before it would refuse; blocks.
    ///
    /// # Errors
    /// When it is low and cannot grow: creates must be refused.
    pub fn ensure_room(&self) -> Result<(), RuntimeError> {
        let space = self.space();
        if space.free_bytes >= self.config.low_water_bytes {
            return Ok(());
        }
        match &self.image {
            Some(image) => image.grow(self.root_fd.as_fd(), &self.config),
            None => Err(RuntimeError::NoRoom("the filesystem of the data directory is nearly full".into())),
        }
    }

    /// Unmounts the image, where there is one; the store is not used afterwards.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn detach(&self) -> Result<(), RuntimeError> {
        if self.image.is_some() {
            // This store's own descriptor keeps it busy until the process ends: it goes then.
            rustix::mount::unmount(&self.root, rustix::mount::UnmountFlags::DETACH)
                .map_err(|e| RuntimeError::host("unmount", &self.root, e))?;
        }
        Ok(())
    }
}

fn ensure_quota(fs: &OwnedFd, root: &Path) -> Result<(), RuntimeError> {
    for mode in [QuotaMode::Simple, QuotaMode::Full] {
        match btrfs::enable_quota(fs.as_fd(), mode) {
            Ok(()) => return Ok(()),
            // Already on, in this mode or the other.
            Err(Errno::EXIST) => return Ok(()),
            Err(Errno::INVAL | Errno::NOTTY | Errno::OPNOTSUPP) => {}
            Err(e) => return Err(RuntimeError::host("switch quotas on for", root, e)),
        }
    }
    // EINVAL is also the answer of a filesystem whose quotas are on in the other mode: a limit tells.
    Ok(())
}
