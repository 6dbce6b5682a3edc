//! The mount at `ROOT/lazy`.

use super::{HolderError, failed};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Its name, as the kernel lists it.
const SOURCE: &str = "corral-lazy";

/// Where files appear.
fn point(root: &Path) -> PathBuf {
    root.join("lazy")
}

/// Opens a connection and mounts it. What a holder that died left there is taken away: the caller has the lock.
///
/// # Errors
/// The kernel refuses.
pub fn mount(root: &Path) -> Result<OwnedFd, HolderError> {
    let at = point(root);
    // Before it is looked at: nothing answers there any more.
    unmount(root);
    match rustix::fs::mkdir(&at, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(failed("make", &at)(error)),
    }
    let path = Path::new("/dev/fuse");
    let device = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(failed("open", path))?;
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other,max_read={}",
        device.as_raw_fd(),
        crate::fuse::MAX_READ
    );
    let options = CString::new(options).map_err(|_| failed("mount", &at)(rustix::io::Errno::INVAL))?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::RDONLY;
    rustix::mount::mount(SOURCE, &at, "fuse", flags, Some(options.as_c_str())).map_err(failed("mount", &at))?;
    Ok(device)
}

/// Whether something of this program is mounted there, be it that it works or not.
pub fn is_mounted(root: &Path) -> bool {
    mounts_at(&listed(root)) > 0
}

/// Where files appear, as the kernel lists it.
fn listed(root: &Path) -> PathBuf {
    std::fs::canonicalize(root).map_or_else(|_| point(root), |root| point(&root))
}

/// Detaches whatever of this program is mounted there; what is open stays open until the connection ends.
pub fn unmount(root: &Path) {
    let at = listed(root);
    for _ in 0..mounts_at(&at) {
        if let Err(error) = rustix::mount::unmount(&at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            eprintln!("corral-lazy: {} stays mounted: {error}", at.display());
        }
    }
}

/// How many mounts of this program lie at a place.
fn mounts_at(at: &Path) -> usize {
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // Fields of proc_pid_mountinfo(5); blanks in a path are written so.
    let escaped = at.display().to_string().replace('\\', "\\134").replace(' ', "\\040").replace('\t', "\\011");
    let is_ours =
        |line: &&str| line.split(' ').nth(4) == Some(&escaped) && line.contains(&format!(" - fuse {SOURCE} "));
    text.lines().filter(is_ours).count()
}
