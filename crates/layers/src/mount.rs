//! Mounting layers: each once per node, from its file, without loop devices, to be shared by all sandboxes.
//!
//! Two mounts of one file would not share page cache, so sandboxes take detached clones ([`LayerStore::open_lower`]) of
//! the one mount. Mounts outlive the process and are taken over by the next.

use crate::error::{MountError, StoreError};
use crate::store::{LayerFiles, LayerStore};
use corral_api::digest::Digest;
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// `EROFS_SUPER_MAGIC_V1`, as statfs(2) reports it.
const EROFS_MAGIC: i64 = 0xE0F5_E1E2;

/// Mount state of one store.
pub(crate) struct Mounts {
    dir: PathBuf,
    /// One lock for each layer, so that a mount is made once however many ask.
    turns: Mutex<HashMap<Digest, Arc<Mutex<()>>>>,
}

/// Holds off mounting and unmounting of one layer.
pub(crate) struct Hold(Arc<Mutex<()>>);

impl Hold {
    pub(crate) fn lock(&self) -> std::sync::MutexGuard<'_, ()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mounts {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir, turns: Mutex::new(HashMap::new()) }
    }

    pub(crate) fn hold(&self, digest: &Digest) -> Hold {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        Hold(Arc::clone(turns.entry(*digest).or_default()))
    }

    /// Where a layer is mounted from its own data.
    fn point(&self, digest: &Digest) -> PathBuf {
        self.dir.join(digest.hex())
    }

    /// Where it is mounted from data that is fetched as it is read. Such a mount stays until it is unused, also when
    /// the data is here: its readers cannot be moved.
    fn lazy_point(&self, digest: &Digest) -> PathBuf {
        self.dir.join(format!("{}.lazy", digest.hex()))
    }

    fn points(&self, digest: &Digest) -> [PathBuf; 2] {
        [self.point(digest), self.lazy_point(digest)]
    }
}

/// Mounts a layer without attaching it; the mount ends with the descriptor.
///
/// # Errors
/// The kernel refuses; [`MountError::Unsupported`] where it cannot mount from these files at all.
pub(crate) fn mount_detached(files: &LayerFiles) -> Result<OwnedFd, MountError> {
    // Direct I/O avoids a second copy in the page cache of the data; not every file system offers it.
    match mount_with(files, true) {
        Err(MountError::Syscall { .. } | MountError::Unsupported { .. }) => mount_with(files, false),
        other => other,
    }
}

fn mount_with(LayerFiles { meta, data }: &LayerFiles, direct_io: bool) -> Result<OwnedFd, MountError> {
    let step = |op| move |e: Errno| MountError::syscall(op, meta, e);
    let unsupported = |e: Errno| MountError::Unsupported { path: meta.to_owned(), source: e.into() };
    let fs = rustix::mount::fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(|e| match e {
        Errno::NODEV | Errno::NOSYS => unsupported(e),
        e => step("open an EROFS mount of")(e),
    })?;
    rustix::mount::fsconfig_set_string(fs.as_fd(), "source", meta).map_err(step("set the source of"))?;
    rustix::mount::fsconfig_set_string(fs.as_fd(), "device", data).map_err(step("set the data of"))?;
    if direct_io {
        rustix::mount::fsconfig_set_flag(fs.as_fd(), "directio").map_err(step("set direct I/O of"))?;
    }
    rustix::mount::fsconfig_set_flag(fs.as_fd(), "ro").map_err(step("set read-only"))?;
    rustix::mount::fsconfig_create(fs.as_fd()).map_err(|e| match e {
        Errno::NOTBLK => unsupported(e),
        e => step("mount")(e),
    })?;
    // Set-user-id programs of an image must work inside, so no MOUNT_ATTR_NOSUID here.
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NODEV;
    rustix::mount::fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(step("mount"))
}

impl LayerStore {
    /// Mounts a layer unless it is mounted, and says where. Many may call at once.
    ///
    /// The file's size and superblock are checked before, and its digest if it was touched since it was last hashed.
    ///
    /// # Errors
    /// No such layer, a damaged one, or the kernel refuses.
    pub fn ensure_mounted(&self, digest: &Digest) -> Result<PathBuf, MountError> {
        let hold = self.mounts().hold(digest);
        let _turn = hold.lock();
        self.mount_held(digest)
    }

    /// Mounts a layer whose turn the caller holds.
    fn mount_held(&self, digest: &Digest) -> Result<PathBuf, MountError> {
        let complete = self.is_complete(digest)?;
        let point = if complete { self.mounts().point(digest) } else { self.mounts().lazy_point(digest) };
        if is_erofs(&point) {
            return Ok(point);
        }
        let files = self.check(digest)?;
        match std::fs::create_dir(&point) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(MountError::syscall("make", &point, e)),
            _ => {}
        }
        let mount = mount_detached(&files)?;
        rustix::mount::move_mount(mount.as_fd(), "", CWD, &point, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
            .map_err(|e| MountError::syscall("attach a mount at", &point, e))?;
        Ok(point)
    }

    /// A fresh detached clone of a layer's mount, for an overlay's lower directory; mounts the layer if need be. The
    /// clone ends with its descriptor: hold it until the overlay is created.
    ///
    /// # Errors
    /// As [`LayerStore::ensure_mounted`].
    pub fn open_lower(&self, digest: &Digest) -> Result<OwnedFd, MountError> {
        // Under the layer's turn: an unmount in between would leave a clone of the empty mount point.
        let hold = self.mounts().hold(digest);
        let _turn = hold.lock();
        let point = self.mount_held(digest)?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        rustix::mount::open_tree(CWD, &point, flags).map_err(|e| MountError::syscall("clone the mount at", &point, e))
    }

    /// Whether a layer is mounted.
    pub fn is_mounted(&self, digest: &Digest) -> bool {
        self.mounts().points(digest).iter().any(|point| is_erofs(point))
    }

    /// Unmounts every layer that `in_use` does not name. Clones given out stay valid. Goes on past failures.
    ///
    /// # Errors
    /// All that failed, one for each layer; the others are unmounted.
    pub fn unmount_unused(&self, in_use: &dyn Fn(&Digest) -> bool) -> Result<Vec<Digest>, Vec<MountError>> {
        let mounted = self.mounted().map_err(|e| vec![e])?;
        let (mut done, mut failed) = (Vec::new(), Vec::new());
        for digest in mounted {
            let hold = self.mounts().hold(&digest);
            let _turn = hold.lock();
            // Asked under the lock: a mount made for someone just now is in use by then.
            if in_use(&digest) {
                continue;
            }
            match self.unmount_held(&digest) {
                Ok(()) => done.push(digest),
                Err(error) => failed.push(error),
            }
        }
        if failed.is_empty() { Ok(done) } else { Err(failed) }
    }

    /// Unmounts a layer whose turn the caller holds.
    pub(crate) fn unmount_held(&self, digest: &Digest) -> Result<(), MountError> {
        self.mounts().points(digest).iter().map(|point| unmount(point)).fold(Ok(()), Result::and)
    }

    /// Unmounts every layer.
    ///
    /// # Errors
    /// As [`LayerStore::unmount_unused`].
    pub fn unmount_all(&self) -> Result<Vec<Digest>, Vec<MountError>> {
        self.unmount_unused(&|_| false)
    }

    /// Lets go of every mount whose data is fetched as it is read: what served them is gone, and so are these. Says of
    /// which layers they were. Clones given out stay, and every read through them fails.
    ///
    /// # Errors
    /// The kernel refuses; what came before is let go of.
    pub fn detach_lazy(&self) -> Result<Vec<Digest>, MountError> {
        let mut lost = Vec::new();
        for point in self.mounted_points()?.into_iter().filter(|point| point.extension().is_some()) {
            let Some(digest) = layer_at(&point) else { continue };
            let hold = self.mounts().hold(&digest);
            let _turn = hold.lock();
            let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
            rustix::mount::unmount(&point, flags).map_err(|e| MountError::syscall("unmount", &point, e))?;
            unmount(&point)?;
            lost.push(digest);
        }
        Ok(lost)
    }

    /// Layers mounted at this store's mount points, as the kernel lists them.
    fn mounted(&self) -> Result<Vec<Digest>, MountError> {
        let mut out: Vec<Digest> = self.mounted_points()?.iter().filter_map(|point| layer_at(point)).collect();
        out.sort();
        out.dedup();
        Ok(out)
    }

    fn mounted_points(&self) -> Result<Vec<PathBuf>, MountError> {
        let path = Path::new("/proc/self/mountinfo");
        let text = std::fs::read(path).map_err(|e| MountError::syscall("read", path, e))?;
        let points = text.split(|b| *b == b'\n').filter_map(mount_point);
        Ok(points.filter(|point| point.parent() == Some(&self.mounts().dir)).collect())
    }

    /// After a restart: keeps mounts of layers that are there, ends those of layers that are not.
    pub(crate) fn adopt_mounts(&self) -> Result<(), StoreError> {
        let mounted =
            self.mounted().map_err(|e| StoreError::io("list", "/proc/self/mountinfo", io::Error::other(e)))?;
        for digest in mounted {
            if self.get(&digest).is_ok() {
                continue;
            }
            for point in self.mounts().points(&digest) {
                if let Err(e) = unmount(&point) {
                    tracing::warn!(%digest, error = %e, "mount of an unknown layer stays");
                }
            }
        }
        Ok(())
    }
}

/// Which layer is mounted at a point, by its name.
fn layer_at(point: &Path) -> Option<Digest> {
    format!("sha256:{}", point.file_stem()?.to_str()?).parse().ok()
}

fn is_erofs(point: &Path) -> bool {
    rustix::fs::statfs(point).is_ok_and(|s| s.f_type == EROFS_MAGIC)
}

fn unmount(point: &Path) -> Result<(), MountError> {
    // Once for each mount stacked there; one is what there should be.
    while is_erofs(point) {
        rustix::mount::unmount(point, UnmountFlags::NOFOLLOW).map_err(|e| MountError::syscall("unmount", point, e))?;
    }
    match std::fs::remove_dir(point) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(MountError::syscall("remove", point, e)),
        _ => Ok(()),
    }
}

/// The mount point of an EROFS line of mountinfo (proc_pid_mountinfo(5)), with its octal escapes undone.
fn mount_point(line: &[u8]) -> Option<PathBuf> {
    let fields: Vec<&[u8]> = line.split(|b| *b == b' ').collect();
    let dash = fields.iter().position(|f| *f == b"-")?;
    if *fields.get(dash + 1)? != b"erofs" {
        return None;
    }
    let mut raw = Vec::new();
    let mut rest = *fields.get(4)?;
    while let Some((first, tail)) = rest.split_first() {
        let octal = (*first == b'\\').then(|| tail.get(..3)).flatten();
        let byte = octal.and_then(|o| std::str::from_utf8(o).ok()).and_then(|o| u8::from_str_radix(o, 8).ok());
        raw.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &tail[3..] } else { tail };
    }
    Some(PathBuf::from(std::ffi::OsString::from_vec(raw)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_lines_are_read_with_escapes() {
        let line = br"36 35 0:98 / /a\040b/mounts/x rw,noatime master:1 - erofs /dev/root rw";
        assert_eq!(mount_point(line), Some(PathBuf::from("/a b/mounts/x")));
        assert_eq!(mount_point(b"36 35 0:98 / /a rw - ext4 /dev/root rw"), None);
        assert_eq!(mount_point(b""), None);
    }
}
