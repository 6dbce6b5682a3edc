//! The inside of a new sandbox before its first program: runs in the child, in all its namespaces but the cgroup one.

use crate::confine;
use crate::filter::Filter;
use crate::protocol::{Launch, Step};
use crate::wire;
use corral_sys::{identity, mounts, netdev, process};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree, unmount,
};
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Files of /proc that are hidden where the kernel has them.
const HIDDEN_FILES: &[&str] = &[
    "proc/kcore",
    "proc/keys",
    "proc/kallsyms",
    "proc/kmsg",
    "proc/kpagecgroup",
    "proc/kpagecount",
    "proc/kpageflags",
    "proc/sysrq-trigger",
    "proc/timer_list",
    "proc/sched_debug",
    "proc/latency_stats",
];
/// Directories likewise.
const HIDDEN_DIRS: &[&str] = &["proc/acpi", "proc/scsi"];
/// Directories of /sys, hidden once in the keeper's own, which all sandboxes share.
const HIDDEN_SYS: &[&str] = &[
    "sys/firmware",
    "sys/kernel/debug",
    "sys/kernel/tracing",
    "sys/fs/bpf",
    "sys/fs/cgroup",
    // Loop devices tell the paths of their files.
    "sys/devices/virtual/block",
    "sys/fs/btrfs",
];

/// What the keeper's server hands to the child by inheritance.
#[derive(Debug)]
pub struct Inherited<'a> {
    /// Child's end of the socket to the keeper.
    pub socket: BorrowedFd<'a>,
    /// The program of the first process.
    pub init: BorrowedFd<'a>,
    /// The filter.
    pub filter: &'a Filter,
    /// Which of the hidden paths this kernel has.
    pub hidden: &'a Hidden,
    /// Whether a mount for /dev/pts comes with the others.
    pub has_pts: bool,
}

/// The hidden paths that exist on this kernel, looked up once.
#[derive(Debug, Clone, Default)]
pub struct Hidden {
    files: Vec<&'static str>,
    dirs: Vec<&'static str>,
}

impl Hidden {
    /// Looks below the keeper's own /proc. What only the host's root may open needs no hiding: the sandbox's root is
    /// another user, and its capabilities do not reach files of users it has not.
    pub fn observe() -> Self {
        use std::os::unix::fs::PermissionsExt;
        const OTHERS: u32 = 0o007;
        let exists = |path: &&&'static str| {
            let found = std::path::Path::new("/").join(path).symlink_metadata();
            found.is_ok_and(|m| m.permissions().mode() & OTHERS != 0)
        };
        Self {
            files: HIDDEN_FILES.iter().filter(exists).copied().collect(),
            dirs: HIDDEN_DIRS.iter().filter(exists).copied().collect(),
        }
    }
}

/// Makes the sandbox's inside and becomes its first process. Returns only on failure, after telling the keeper.
pub fn run(launch: &Launch, inherited: &Inherited<'_>) -> i32 {
    let Err((step, errno)) = inside(launch, inherited);
    let report = [b'E', step as u8, errno.raw_os_error() as u8];
    // The keeper sees the exit in any case.
    wire::send(inherited.socket, &report, &[]).unwrap_or(());
    1
}

fn inside(launch: &Launch, inherited: &Inherited<'_>) -> Result<std::convert::Infallible, (Step, Errno)> {
    let at = |step: Step| move |errno: Errno| (step, errno);
    process::close_all_but(&[inherited.socket.as_raw_fd(), inherited.init.as_raw_fd()]).map_err(at(Step::Request))?;
    // Waits here until the keeper has written the id maps and made the mounts.
    let mut buffer = [0u8; 8];
    let received = wire::receive(inherited.socket, &mut buffer).map_err(|_| (Step::Request, Errno::PIPE))?;
    let mut fds = received.fds.into_iter();
    let mut next = || fds.next().ok_or((Step::Request, Errno::BADF));
    let (root, dev, sys, shm) = (next()?, next()?, next()?, next()?);
    let pts = if inherited.has_pts { next()? } else { devpts().map_err(at(Step::Dev))? };
    let binds: Vec<OwnedFd> = fds.collect();
    if binds.len() != launch.binds.len() {
        return Err((Step::Request, Errno::BADF));
    }

    identity::set_all(0, 0).map_err(at(Step::Identity))?;
    process::own_cgroup_namespace().map_err(at(Step::Cgroup))?;

    let beneath = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(root.as_fd(), "", CWD, "/root", beneath).map_err(at(Step::Root))?;
    rustix::process::chdir("/root").map_err(at(Step::Root))?;
    let here = rustix::fs::openat(CWD, ".", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(at(Step::Root))?;

    // The platform's own layer lies on top and has these as directories, whatever the image has there.
    let noexec =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    attach(&filesystem("proc", &[], noexec).map_err(at(Step::Proc))?, &here, "proc").map_err(at(Step::Proc))?;
    attach(&sys, &here, "sys").map_err(at(Step::Sys))?;
    attach(&dev, &here, "dev").map_err(at(Step::Dev))?;
    attach(&pts, &here, "dev/pts").map_err(at(Step::Dev))?;
    attach(&shm, &here, "dev/shm").map_err(at(Step::Dev))?;
    attach(&filesystem("mqueue", &[], noexec).map_err(at(Step::Dev))?, &here, "dev/mqueue").map_err(at(Step::Dev))?;

    hide(inherited.hidden, &here).map_err(at(Step::Mask))?;
    for (mount, place) in binds.iter().zip(&launch.binds) {
        attach(mount, &here, place).map_err(at(Step::Mask))?;
    }

    rustix::process::pivot_root(".", ".").map_err(at(Step::PivotRoot))?;
    unmount(".", UnmountFlags::DETACH).map_err(at(Step::PivotRoot))?;
    rustix::process::chdir("/").map_err(at(Step::PivotRoot))?;

    rustix::system::sethostname(launch.hostname.as_bytes()).map_err(at(Step::Names))?;
    if launch.write_names {
        write_names(&launch.hostname).map_err(at(Step::Names))?;
    }
    netdev::bring_loopback_up().map_err(at(Step::Network))?;
    process::set_limit(process::LIMIT_CORE, 0).map_err(at(Step::Limits))?;
    confine::set_affinity(&launch.affinity).map_err(at(Step::Limits))?;
    confine::become_user(inherited.filter, 0, 0, &[], launch.allow_setuid)?;
    // Without its keeper a sandbox has nobody to drain its output or to let anyone in: it must not outlive it unseen.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(at(Step::Privileges))?;
    process::reset_signals().map_err(at(Step::Exec))?;
    // The first process reads nothing from anyone, and its pages are laid out to share page tables with its stack.
    process::fix_addresses().map_err(at(Step::Exec))?;
    let argv = [CString::from(c"init")];
    Err((Step::Exec, process::exec_fd(inherited.init, &argv, &[])))
}

/// Terminals of the sandbox's own, as a detached mount. The caller is its root.
///
/// # Errors
/// Those of mounting.
pub fn devpts() -> Result<OwnedFd, Errno> {
    // Terminals are devices: NODEV would make them useless.
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    // Most of them: the whole host has some thousand.
    const MOST: &str = "128";
    let options = [("newinstance", ""), ("ptmxmode", "0666"), ("mode", "0620"), ("gid", "5"), ("max", MOST)];
    filesystem("devpts", &options, attributes)
}

fn filesystem(kind: &str, options: &[(&str, &str)], attributes: MountAttrFlags) -> Result<OwnedFd, Errno> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        if value.is_empty() {
            rustix::mount::fsconfig_set_flag(context.as_fd(), *key)?;
        } else {
            fsconfig_set_string(context.as_fd(), *key, *value)?;
        }
    }
    fsconfig_create(context.as_fd())?;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

/// Attaches a detached mount at a path below `root` that holds no symbolic link.
///
/// # Errors
/// Those of openat2(2) and move_mount(2).
pub fn attach(mount: &OwnedFd, root: &OwnedFd, place: &str) -> Result<(), Errno> {
    let target = openat2(
        root,
        place,
        OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW,
        Mode::empty(),
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(mount.as_fd(), "", target.as_fd(), "", flags)
}

fn hide(hidden: &Hidden, root: &OwnedFd) -> Result<(), Errno> {
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    for path in &hidden.files {
        attach(&open_tree(root.as_fd(), "dev/null", clone)?, root, path)?;
    }
    for path in &hidden.dirs {
        attach(&open_tree(root.as_fd(), "dev/.empty", clone)?, root, path)?;
    }
    let sysctl = open_tree(root.as_fd(), "proc/sys", clone)?;
    mounts::set_attributes(
        sysctl.as_fd(),
        mounts::attr::RDONLY | mounts::attr::NOSUID | mounts::attr::NODEV | mounts::attr::NOEXEC,
        None,
    )?;
    attach(&sysctl, root, "proc/sys")
}

/// Writes /etc/hostname and /etc/hosts; needed only when the host name is not the one of the platform's layer.
fn write_names(hostname: &str) -> Result<(), Errno> {
    let hosts = format!("127.0.0.1\tlocalhost {hostname}\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    for (path, text) in [("etc/hostname", format!("{hostname}\n")), ("etc/hosts", hosts)] {
        let root = rustix::fs::openat(CWD, "/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let file = openat2(
            &root,
            path,
            OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK,
            Mode::from_raw_mode(0o644),
            ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS,
        )?;
        rustix::io::write(&file, text.as_bytes())?;
    }
    Ok(())
}

/// Where the keeper has the directories that sandboxes see as /dev/shm.
pub const SHM: &str = "/shm";

/// Builds the keeper's own root: a tmpfs with an empty /root to attach sandboxes at, /proc, and what sandboxes share:
/// /sys (of an empty network namespace, read-only for them), /dev (likewise) and /shm, of which each gets a directory.
///
/// A child copies only these few mounts instead of all the host's. And they are shared because superblocks are dear:
/// every memory cgroup holds a kilobyte for each 64 superblocks that ever were live at once, so memory per sandbox grows
/// with the number of sandboxes times the superblocks of each.
///
/// # Errors
/// The call that failed.
pub fn enter_private_root() -> Result<(), (&'static str, Errno)> {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    let none = None::<&std::ffi::CStr>;
    process::own_mount_namespace().map_err(|e| ("unshare", e))?;
    process::own_network_namespace().map_err(|e| ("unshare the network", e))?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(|e| ("make / private", e))?;
    mount("tmpfs", "/tmp", "tmpfs", MountFlags::NOSUID, Some(c"mode=0755,size=1m")).map_err(|e| ("mount tmpfs", e))?;
    rustix::process::chdir("/tmp").map_err(|e| ("chdir", e))?;
    for dir in ["root", "proc", "sys", "dev", "shm"] {
        rustix::fs::mkdirat(CWD, dir, Mode::from_raw_mode(0o755)).map_err(|e| ("mkdir", e))?;
    }
    mount("proc", "proc", "proc", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, none)
        .map_err(|e| ("mount proc", e))?;
    mount("sysfs", "sys", "sysfs", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, none)
        .map_err(|e| ("mount sysfs", e))?;
    mount("tmpfs", "dev", "tmpfs", MountFlags::NOSUID | MountFlags::NOEXEC, Some(c"mode=0755,size=64k"))
        .map_err(|e| ("mount dev", e))?;
    fill_dev().map_err(|e| ("fill /dev", e))?;
    // Bounded by each sandbox's memory limit: its pages and inodes are charged to who makes them.
    mount("tmpfs", "shm", "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, Some(c"mode=0700,size=100%,nr_inodes=0"))
        .map_err(|e| ("mount shm", e))?;
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    // This sysfs is new and nothing is mounted in it: most of these are empty, and a mask is a mount for each sandbox.
    let has_entries = |dir: &&&str| std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some());
    for dir in HIDDEN_SYS.iter().filter(has_entries) {
        let empty = open_tree(CWD, "dev/.empty", clone).map_err(|e| ("clone", e))?;
        move_mount(empty.as_fd(), "", CWD, *dir, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).map_err(|e| ("hide", e))?;
    }
    rustix::process::pivot_root(".", ".").map_err(|e| ("pivot_root", e))?;
    unmount(".", UnmountFlags::DETACH).map_err(|e| ("unmount the old root", e))?;
    rustix::process::chdir("/").map_err(|e| ("chdir /", e))?;
    Ok(())
}

fn fill_dev() -> Result<(), Errno> {
    use rustix::fs::{FileType, chmodat, makedev, mkdirat, mknodat, symlinkat};
    for (name, minor_of) in
        [("null", (1, 3)), ("zero", (1, 5)), ("full", (1, 7)), ("random", (1, 8)), ("urandom", (1, 9)), ("tty", (5, 0))]
    {
        let path = format!("dev/{name}");
        mknodat(CWD, &path, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(minor_of.0, minor_of.1))?;
        chmodat(CWD, &path, Mode::from_raw_mode(0o666), AtFlags::empty())?;
    }
    for (target, name) in [
        ("pts/ptmx", "ptmx"),
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
    ] {
        symlinkat(target, CWD, format!("dev/{name}"))?;
    }
    for dir in ["pts", "shm", "mqueue", ".empty"] {
        mkdirat(CWD, format!("dev/{dir}"), Mode::from_raw_mode(0o755))?;
    }
    Ok(())
}
