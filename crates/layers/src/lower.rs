//! What lies beneath a run: the merged, read-only view of the stored layers under it.
//!
//! A detached overlay mount answers exactly as the kernel will later; it vanishes with its descriptor.

use crate::error::MountError;
use crate::mount::mount_detached;
use crate::store::LayerFiles;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;

/// The merged view of some stored layers.
pub(crate) struct LowerView {
    root: OwnedFd,
}

impl LowerView {
    /// Mounts the layers' files, lowest first, without attaching them anywhere. `None` where there are none.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn open(files: &[LayerFiles]) -> Result<Option<Self>, MountError> {
        let Some(last) = files.last() else { return Ok(None) };
        let mut mounts = files.iter().map(mount_detached).collect::<Result<Vec<_>, _>>()?;
        if mounts.len() == 1 {
            return Ok(mounts.pop().map(|root| Self { root }));
        }
        let step = |op| move |e: Errno| MountError::syscall(op, &last.meta, e);
        let fs = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC).map_err(step("open an overlay over"))?;
        for mount in mounts.iter().rev() {
            // Descriptors are taken since Linux 6.13, paths since 6.5.
            if rustix::mount::fsconfig_set_fd(fs.as_fd(), "lowerdir+", mount.as_fd()).is_err() {
                let path = format!("/proc/self/fd/{}", mount.as_raw_fd());
                rustix::mount::fsconfig_set_string(fs.as_fd(), "lowerdir+", path)
                    .map_err(step("stack an overlay over"))?;
            }
        }
        rustix::mount::fsconfig_create(fs.as_fd()).map_err(step("create an overlay over"))?;
        let root = rustix::mount::fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_RDONLY)
            .map_err(step("mount an overlay over"))?;
        Ok(Some(Self { root }))
    }

    /// A path by which this process reaches its top, as long as the view is held.
    pub(crate) fn top(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.root.as_raw_fd()).into()
    }

    /// Opens a canonical path (empty for the root) without following any link; `None` where there is nothing.
    pub(crate) fn open_path(&self, path: &[u8], flags: OFlags) -> rustix::io::Result<Option<OwnedFd>> {
        let path: &[u8] = if path.is_empty() { b"." } else { path };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
        // The last component may be a link: it is opened itself, which NO_SYMLINKS allows with O_PATH|O_NOFOLLOW.
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        match rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// What lies at a canonical path.
    pub(crate) fn stat(&self, path: &[u8]) -> rustix::io::Result<Option<Stat>> {
        let Some(fd) = self.open_path(path, OFlags::PATH)? else { return Ok(None) };
        rustix::fs::statat(&fd, c"", AtFlags::EMPTY_PATH).map(Some)
    }

    /// Whether a directory lies at a canonical path.
    pub(crate) fn is_dir(&self, path: &[u8]) -> rustix::io::Result<bool> {
        Ok(self.stat(path)?.is_some_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Directory))
    }
}
