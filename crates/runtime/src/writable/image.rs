//! The btrfs image that holds writable layers where the data directory's filesystem has no quotas.

use super::{WritableConfig, is_btrfs};
use crate::RuntimeError;
use corral_sys::{btrfs, loopdev};
use rustix::fs::{CWD, FallocateFlags, Mode, OFlags, fallocate, openat};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The image file.
#[derive(Debug)]
pub struct Image {
    path: PathBuf,
    mountpoint: PathBuf,
}

impl Image {
    /// Makes the image when it is missing, and mounts it when it is not mounted.
    ///
    /// # Errors
    /// When the host has no room for it, or tools or the kernel refuse.
    pub fn ensure_mounted(path: &Path, mountpoint: &Path, config: &WritableConfig) -> Result<Self, RuntimeError> {
        // As the kernel names it in mountinfo.
        let canonical = mountpoint.canonicalize().map_err(|e| RuntimeError::host("resolve", mountpoint, e))?;
        let image = Self { path: path.to_owned(), mountpoint: canonical };
        if is_btrfs(mountpoint) {
            return Ok(image);
        }
        if !path.exists() {
            image.make(config)?;
        }
        // The device frees itself at its last close: it is held open until the mount holds it.
        let (device, _held) = image.attach()?;
        // Discards would give back the blocks that were allocated ahead.
        mount(&device, mountpoint, "btrfs", MountFlags::NOATIME | MountFlags::NODEV, Some(c"nodiscard,space_cache=v2"))
            .map_err(|e| RuntimeError::host("mount", path, e))?;
        Ok(image)
    }

    fn make(&self, config: &WritableConfig) -> Result<(), RuntimeError> {
        let part = self.path.with_extension("part");
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
        let file =
            openat(CWD, &part, flags, Mode::from_raw_mode(0o600)).map_err(|e| RuntimeError::host("make", &part, e))?;
        let made = extend(&file, &self.path, 0, config).and_then(|()| {
            // A node killed half-way leaves a .part file, which the next start overwrites.
            let output = Command::new("mkfs.btrfs")
                .args(["--quiet", "--force", "--nodiscard", "--metadata", "single", "--label", "corral"])
                .arg(&part)
                .stdin(Stdio::null())
                .output()
                .map_err(|e| RuntimeError::host("run mkfs.btrfs (package btrfs-progs) for", &part, e))?;
            if output.status.success() {
                std::fs::rename(&part, &self.path).map_err(|e| RuntimeError::host("rename", &part, e))
            } else {
                let text = String::from_utf8_lossy(&output.stderr);
                Err(RuntimeError::Unsupported(format!("mkfs.btrfs failed: {}", text.trim())))
            }
        });
        if made.is_err() {
            std::fs::remove_file(&part).unwrap_or(());
        }
        made
    }

    /// Puts the image behind a free loop device and returns the device's path, and the device itself.
    fn attach(&self) -> Result<(PathBuf, OwnedFd), RuntimeError> {
        /// Another process may take the free device first.
        const TRIES: usize = 16;
        let open = |path: &Path| {
            openat(CWD, path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
                .map_err(|e| RuntimeError::host("open", path, e))
        };
        let file = open(&self.path)?;
        let control = open(Path::new("/dev/loop-control"))?;
        for _ in 0..TRIES {
            let number = loopdev::free_number(control.as_fd())
                .map_err(|e| RuntimeError::host("find a free loop device with", "/dev/loop-control", e))?;
            let device = PathBuf::from(format!("/dev/loop{number}"));
            ensure_node(&device, number)?;
            let held = open(&device)?;
            match loopdev::configure(held.as_fd(), file.as_fd()) {
                Ok(()) => return Ok((device, held)),
                Err(Errno::BUSY) => {}
                Err(e) => return Err(RuntimeError::host("attach", &self.path, e)),
            }
        }
        Err(RuntimeError::Unsupported("no free loop device".into()))
    }

    /// Grows the image by a step.
    ///
    /// # Errors
    /// When the host has no more than the reserve left, or the kernel refuses.
    pub fn grow(&self, fs: BorrowedFd<'_>, config: &WritableConfig) -> Result<(), RuntimeError> {
        let file = openat(CWD, &self.path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| RuntimeError::host("open", &self.path, e))?;
        let size = rustix::fs::fstat(&file).map_err(|e| RuntimeError::host("stat", &self.path, e))?.st_size as u64;
        extend(&file, &self.path, size, config)?;
        let device = self.device()?;
        let device_fd = openat(CWD, &device, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| RuntimeError::host("open", &device, e))?;
        loopdev::refresh_capacity(device_fd.as_fd()).map_err(|e| RuntimeError::host("grow", &device, e))?;
        btrfs::grow_to_device(fs).map_err(|e| RuntimeError::host("grow", &self.mountpoint, e))
    }

    /// The loop device under the mountpoint.
    fn device(&self) -> Result<PathBuf, RuntimeError> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")
            .map_err(|e| RuntimeError::host("read", "/proc/self/mountinfo", e))?;
        let wanted = self.mountpoint.to_string_lossy().replace(' ', "\\040");
        mounts
            .lines()
            .rev()
            .find_map(|line| {
                let (front, back) = line.split_once(" - ")?;
                (front.split(' ').nth(4)? == wanted).then(|| back.split(' ').nth(1).map(PathBuf::from))?
            })
            .ok_or_else(|| RuntimeError::Unsupported(format!("{wanted} is not mounted")))
    }
}

/// Allocates another step behind `size`, if the host keeps its reserve.
fn extend(file: &OwnedFd, path: &Path, size: u64, config: &WritableConfig) -> Result<(), RuntimeError> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let host = rustix::fs::statvfs(dir).map_err(|e| RuntimeError::host("ask for the free space of", dir, e))?;
    let free = host.f_bavail * host.f_frsize;
    if free < config.step_bytes + config.reserve_bytes {
        return Err(RuntimeError::NoRoom(format!(
            "{} MiB are free on the host, {} MiB are needed with the reserve",
            free >> 20,
            (config.step_bytes + config.reserve_bytes) >> 20
        )));
    }
    fallocate(file, FallocateFlags::empty(), size, config.step_bytes)
        .map_err(|e| RuntimeError::host("allocate space for", path, e))
}

/// Makes the device node where no device manager does.
fn ensure_node(device: &Path, number: u32) -> Result<(), RuntimeError> {
    const LOOP_MAJOR: u32 = 7;
    if device.exists() {
        return Ok(());
    }
    let id = rustix::fs::makedev(LOOP_MAJOR, number);
    match rustix::fs::mknodat(CWD, device, rustix::fs::FileType::BlockDevice, Mode::from_raw_mode(0o600), id) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(e) => Err(RuntimeError::host("make", device, e)),
    }
}
