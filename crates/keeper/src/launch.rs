//! The keeper's side of starting a sandbox: the process in its namespaces, its id maps and its root.

use crate::kit::Kit;
use crate::protocol::{Launch, Step};
use crate::setup::{self, Inherited};
use crate::wire;
use corral_api::ids::SandboxId;
use corral_sys::fork::{self, clone_child, flags};
use corral_sys::{identity, mounts};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_fd, fsconfig_set_string,
    fsmount, fsopen, open_tree,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Host ids in a sandbox's range.
pub const IDS_PER_SANDBOX: u32 = 65_536;

const NAMESPACES: u64 = flags::NEWUSER | flags::NEWPID | flags::NEWNS | flags::NEWNET | flags::NEWIPC | flags::NEWUTS;

/// A sandbox whose first process is being set up; the socket reports a failure or closes at success.
#[derive(Debug)]
pub struct Starting {
    /// First process.
    pub pid: i32,
    /// Socket to it.
    pub socket: OwnedFd,
}

/// Starts a sandbox. On failure nothing is left running.
///
/// # Errors
/// The step that failed.
pub fn launch(kit: &Kit, launch: &Launch, fds: Vec<OwnedFd>) -> Result<Starting, (Step, Errno)> {
    let expected =
        usize::from(launch.cgroups) + usize::from(launch.unified) + 1 + launch.binds.len() + usize::from(launch.lowers);
    if fds.len() != expected || launch.lowers == 0 {
        return Err((Step::Request, Errno::BADF));
    }
    let mut fds = fds.into_iter();
    let cgroups: Vec<OwnedFd> = fds.by_ref().take(launch.cgroups.into()).collect();
    let unified = if launch.unified { fds.next() } else { None };
    let writable = fds.next().ok_or((Step::Request, Errno::BADF))?;
    let binds: Vec<OwnedFd> = fds.by_ref().take(launch.binds.len()).collect();
    let lowers: Vec<OwnedFd> = fds.collect();

    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|e| (Step::Request, e))?;
    let inherited = Inherited {
        socket: theirs.as_fd(),
        init: kit.init.as_fd(),
        filter: &kit.filter,
        hidden: &kit.hidden,
        has_pts: kit.terminals.is_some(),
    };
    // The namespace's allowances (inotify, signals, queues) are counted for the user that makes it.
    identity::set_effective(launch.id_base, launch.id_base).map_err(|e| (Step::Identity, e))?;
    let cloned =
        clone_child(kit.single, NAMESPACES, unified.as_ref().map(AsFd::as_fd), || setup::run(launch, &inherited));
    identity::set_effective(0, 0).map_err(|e| (Step::Identity, e))?;
    let pid = cloned.map_err(|e| (Step::Clone, e))?;
    drop(theirs);

    let made = furnish(kit, launch, pid, &cgroups, &writable, &lowers)
        .and_then(|mounts| {
            let mut send: Vec<_> = mounts.iter().map(AsFd::as_fd).collect();
            send.extend(binds.iter().map(AsFd::as_fd));
            wire::send(ours.as_fd(), b"go", &send).map_err(|e| (Step::Request, e))
        })
        .and_then(|()| rustix::io::ioctl_fionbio(&ours, true).map_err(|e| (Step::Request, e)));
    if let Err(failure) = made {
        // The child dies of the closed socket too; killing it makes sure, reaping it leaves nothing.
        corral_sys::process::kill(pid, libc::SIGKILL).unwrap_or(());
        fork::wait_for(pid).map_err(|e| (Step::Died, e))?;
        remove_places(kit, &launch.sandbox);
        return Err(failure);
    }
    Ok(Starting { pid, socket: ours })
}

fn furnish(
    kit: &Kit,
    launch: &Launch,
    pid: i32,
    cgroups: &[OwnedFd],
    writable: &OwnedFd,
    lowers: &[OwnedFd],
) -> Result<Vec<OwnedFd>, (Step, Errno)> {
    for procs in cgroups {
        rustix::io::write(procs, pid.to_string().as_bytes()).map_err(|e| (Step::Cgroup, e))?;
    }
    let map = format!("0 {} {IDS_PER_SANDBOX}\n", launch.id_base);
    for file in ["uid_map", "gid_map"] {
        write_proc(pid, file, &map).map_err(|e| (Step::IdMap, e))?;
    }
    let userns =
        rustix::fs::openat(CWD, format!("/proc/{pid}/ns/user"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| (Step::IdMap, e))?;
    let mapped = |mount: &OwnedFd, set: u64| {
        mounts::set_attributes(mount.as_fd(), set, Some(userns.as_fd())).map_err(|e| (Step::LayerIdMap, e))
    };
    for lower in lowers {
        mapped(lower, 0)?;
    }
    mapped(writable, 0)?;
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let dev = open_tree(CWD, "/dev", clone).map_err(|e| (Step::Dev, e))?;
    mapped(&dev, mounts::attr::RDONLY)?;
    let sys = open_tree(CWD, "/sys", clone | OpenTreeFlags::AT_RECURSIVE).map_err(|e| (Step::Sys, e))?;
    mounts::set_tree_attributes(sys.as_fd(), mounts::attr::RDONLY).map_err(|e| (Step::Sys, e))?;
    let shm_dir = shm_dir(&launch.sandbox);
    rustix::fs::mkdirat(CWD, &shm_dir, Mode::empty()).map_err(|e| (Step::Dev, e))?;
    rustix::fs::chmodat(CWD, &shm_dir, Mode::from_raw_mode(0o1777), AtFlags::empty()).map_err(|e| (Step::Dev, e))?;
    let shm = open_tree(CWD, &shm_dir, clone).map_err(|e| (Step::Dev, e))?;
    mapped(&shm, mounts::attr::NOEXEC)?;
    let root = overlay(launch, writable, lowers).map_err(|e| (Step::Overlay, e))?;
    let mut mounts = vec![root, dev, sys, shm];
    if let Some(terminals) = &kit.terminals {
        mounts.push(terminals.place(&launch.sandbox).map_err(|e| (Step::Dev, e))?);
    }
    Ok(mounts)
}

fn shm_dir(sandbox: &SandboxId) -> String {
    format!("{}/{sandbox}", setup::SHM)
}

/// Removes a sandbox's directories in what all share. What it left in /dev/shm is removed in a process of its own, since
/// it may be much; returns its id, when one was needed.
pub fn remove_places(kit: &Kit, sandbox: &SandboxId) -> Option<i32> {
    if let Some(terminals) = &kit.terminals {
        terminals.remove(sandbox);
    }
    let dir = shm_dir(sandbox);
    if rustix::fs::rmdir(&dir).is_ok() {
        return None;
    }
    clone_child(kit.single, 0, None, || i32::from(std::fs::remove_dir_all(&dir).is_err())).ok()
}

fn write_proc(pid: i32, file: &str, text: &str) -> Result<(), Errno> {
    let path = format!("/proc/{pid}/{file}");
    let file = rustix::fs::openat(CWD, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, text.as_bytes()).map(|_| ())
}

/// Merges the layers. The overlay must see the sandbox's root as the one who creates its work directory.
fn overlay(launch: &Launch, writable: &OwnedFd, lowers: &[OwnedFd]) -> Result<OwnedFd, Errno> {
    let open = |name: &str| {
        rustix::fs::openat(writable, name, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    };
    let (upper, work) = (open("upper")?, open("work")?);
    identity::set_filesystem(launch.id_base, launch.id_base);
    let made = (|| {
        let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let context = context.as_fd();
        let set = |key: &str, fd: &OwnedFd| match fsconfig_set_fd(context, key, fd.as_fd()) {
            // Before Linux 6.13 layers are given by path.
            Err(Errno::INVAL) => fsconfig_set_string(context, key, format!("/proc/self/fd/{}", fd.as_raw_fd())),
            other => other,
        };
        for lower in lowers {
            set("lowerdir+", lower)?;
        }
        set("upperdir", &upper)?;
        set("workdir", &work)?;
        // A sandbox does not outlive its host, so it need not wait for the disk.
        rustix::mount::fsconfig_set_flag(context, "volatile")?;
        fsconfig_set_string(context, "xino", "off")?;
        fsconfig_create(context)?;
        let mut attributes = MountAttrFlags::MOUNT_ATTR_NODEV;
        if !launch.allow_setuid {
            attributes |= MountAttrFlags::MOUNT_ATTR_NOSUID;
        }
        fsmount(context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    })();
    identity::set_filesystem(0, 0);
    made
}
