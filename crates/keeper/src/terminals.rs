//! Terminals on first use: a sandbox's devpts is mounted when something in it first looks into /dev/pts.
//!
//! Few sandboxes ever open a terminal, and a devpts of its own costs each some 60 KiB at thousands of sandboxes (see
//! `setup` on superblocks). So /dev/pts begins as a directory of one automount that all share. The kernel holds whoever
//! enters it, in whichever mount namespace, and names the directory, which is the sandbox's id; a helper mounts devpts
//! there. The keeper waits for nobody. Where the kernel has no automounter, devpts is mounted at the start.

use crate::setup;
use corral_api::ids::SandboxId;
use corral_sys::fork::{SingleThreaded, clone_child};
use corral_sys::{autofs, identity, process};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, OpenTreeFlags, mount, open_tree};
use rustix::pipe::{PipeFlags, pipe_with};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Where the automount lies in the keeper's own root.
const PLACE: &str = "/pts";

/// Bytes of `struct autofs_v5_packet`, and where its parts lie.
const PACKET: usize = 304;
const TOKEN: usize = 8;
const NAME_LENGTH: usize = 40;
const NAME: usize = 44;

/// Type of devpts in statfs(2).
const DEVPTS: i64 = 0x1cd1;

/// The automount.
#[derive(Debug)]
pub struct Terminals {
    /// Its root, for answers.
    root: OwnedFd,
    /// What is wanted.
    pipe: OwnedFd,
}

/// A sandbox whose devpts is wanted.
#[derive(Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Names the request in the answer.
    pub token: u32,
    /// Which sandbox.
    pub sandbox: String,
}

impl Terminals {
    /// Mounts the automount. The calling process's group, the keeper and its helpers, enters without being held.
    ///
    /// # Errors
    /// When the kernel has no automounter.
    pub fn prepare() -> Result<Self, Errno> {
        /// Requests that may wait to be read, a page each: more than one read of the keeper's loop takes.
        const QUEUE_BYTES: usize = 1 << 20;
        let (pipe, kernel_end) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::DIRECT)?;
        rustix::io::ioctl_fionbio(&pipe, true)?;
        rustix::pipe::fcntl_setpipe_size(&pipe, QUEUE_BYTES)?;
        rustix::fs::mkdir(PLACE, Mode::from_raw_mode(0o755))?;
        let group = rustix::process::getpgrp().as_raw_nonzero();
        let options = format!("fd={},pgrp={group},minproto=5,maxproto=5,indirect\0", kernel_end.as_raw_fd());
        let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).map_err(|_| Errno::INVAL)?;
        mount("autofs", PLACE, "autofs", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, Some(options))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(CWD, PLACE, flags, Mode::empty())?;
        Ok(Self { root, pipe })
    }

    /// Root and pipe, to be inherited.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.root.as_fd(), self.pipe.as_fd()]
    }

    /// The numbers of the same.
    pub fn numbers(&self) -> [i32; 2] {
        self.descriptors().map(|fd| fd.as_raw_fd())
    }

    /// Takes those that the program before had.
    ///
    /// # Errors
    /// When they are not there.
    pub fn inherit([root, pipe]: [i32; 2]) -> Result<Self, Errno> {
        Ok(Self { root: process::inherited(root)?, pipe: process::inherited(pipe)? })
    }

    /// Becomes readable when something is wanted.
    pub fn pipe(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }

    /// What a sandbox gets as its /dev/pts, as a detached mount.
    ///
    /// # Errors
    /// When the directory or the mount cannot be made.
    pub fn place(&self, sandbox: &SandboxId) -> Result<OwnedFd, Errno> {
        let dir = format!("{PLACE}/{sandbox}");
        rustix::fs::mkdir(&dir, Mode::from_raw_mode(0o755))?;
        open_tree(CWD, dir, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)
    }

    /// Takes a sandbox's place away again.
    pub fn remove(&self, sandbox: &SandboxId) {
        // One whose start failed early has none.
        rustix::fs::rmdir(format!("{PLACE}/{sandbox}")).unwrap_or(());
    }

    /// The next request, if there is one.
    pub fn next(&self) -> Option<Wanted> {
        let mut packet = [0u8; PACKET];
        match rustix::io::read(&self.pipe, &mut packet) {
            Ok(PACKET) => parse(&packet),
            _ => None,
        }
    }

    /// Lets those who wait go on.
    pub fn answer(&self, token: u32, mounted: bool) {
        // They may have been killed meanwhile; then nobody waits.
        autofs::answer(self.root.as_fd(), token, mounted).unwrap_or(());
    }
}

fn parse(packet: &[u8; PACKET]) -> Option<Wanted> {
    let word = |at: usize| Some(u32::from_ne_bytes(packet.get(at..at + 4)?.try_into().ok()?));
    let name = packet.get(NAME..NAME + word(NAME_LENGTH)? as usize)?;
    Some(Wanted { token: word(TOKEN)?, sandbox: String::from_utf8(name.to_vec()).ok()? })
}

/// Starts the helper that mounts devpts in the sandbox whose first process is `init`; its status tells whether it did.
///
/// # Errors
/// When it cannot be started.
pub fn mount_in(single: SingleThreaded, init: i32) -> Result<i32, Errno> {
    let target = rustix::process::Pid::from_raw(init).ok_or(Errno::SRCH)?;
    let target = rustix::process::pidfd_open(target, rustix::process::PidfdFlags::empty())?;
    clone_child(single, 0, None, || i32::from(mount_here(target.as_fd()).is_err()))
}

fn mount_here(target: BorrowedFd<'_>) -> Result<(), Errno> {
    use rustix::thread::ThreadNameSpaceType as Space;
    process::close_all_but(&[target.as_raw_fd()])?;
    rustix::thread::move_into_thread_name_spaces(target, Space::USER | Space::MOUNT)?;
    identity::set_all(0, 0)?;
    if rustix::fs::statfs("/dev/pts")?.f_type == DEVPTS {
        return Ok(());
    }
    let root = rustix::fs::openat(CWD, "/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    setup::attach(&setup::devpts()?, &root, "dev/pts")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(length: u32) -> [u8; PACKET] {
        let mut packet = [0u8; PACKET];
        packet[TOKEN..TOKEN + 4].copy_from_slice(&7u32.to_ne_bytes());
        packet[NAME_LENGTH..NAME_LENGTH + 4].copy_from_slice(&length.to_ne_bytes());
        packet[NAME..NAME + 5].copy_from_slice(b"sabcd");
        packet
    }

    #[test]
    fn a_packet_names_the_sandbox() {
        assert_eq!(parse(&packet(5)), Some(Wanted { token: 7, sandbox: "sabcd".into() }));
    }

    #[test]
    fn a_name_longer_than_its_packet_is_none() {
        assert_eq!(parse(&packet(261)), None);
        assert_eq!(parse(&packet(u32::MAX)), None);
    }
}
