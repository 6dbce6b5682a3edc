//! Overlay, EROFS, tmpfs, btrfs and loop devices, tried with mounts that are attached nowhere.

use super::kernel::{read, tool};
use super::{Found, Row, degraded, missing, needed, ok, useful};
use rustix::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_fd, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, open_tree,
};
use rustix::pipe::{PipeFlags, pipe_with};
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

pub(super) fn rows(data_dir: &Path) -> Vec<Row> {
    let on_btrfs = is_on_btrfs(data_dir);
    vec![
        needed("overlay", "no sandbox can have a root file system", overlay()),
        needed("overlay, idmapped lowers", "no sandbox can have users of its own over shared layers", idmapped()),
        needed("erofs", "no layer can be mounted", erofs_known()),
        needed("erofs, file-backed", "no layer can be mounted", erofs_file()),
        needed("tmpfs, idmapped", "no sandbox can have a /dev/shm of its own", tmpfs()),
        needed("btrfs", "no sandbox can have a writable layer", known("btrfs")),
        useful(
            "btrfs for data",
            "writable layers lie in an image behind a loop device",
            data_directory(data_dir, on_btrfs),
        ),
        for_the_image("loop devices", on_btrfs, loops()),
        for_the_image("mkfs.btrfs", on_btrfs, tool("mkfs.btrfs", "btrfs-progs")),
        useful("autofs", "a devpts is mounted in each sandbox at its start: some 60 KiB more for each", autofs()),
    ]
}

/// What the image of writable layers needs, which there is unless the data directory is on btrfs.
fn for_the_image(feature: &'static str, on_btrfs: bool, (state, detail): Found) -> Row {
    let without = "no writable layers unless the data directory is on btrfs";
    Row { feature, state, required: !on_btrfs, detail, without }
}

/// Whether a directory is, or would be made, on btrfs.
fn is_on_btrfs(dir: &Path) -> bool {
    /// As in linux/magic.h.
    const BTRFS: u64 = 0x9123_683E;
    let there = dir.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    rustix::fs::statfs(there).is_ok_and(|fs| fs.f_type as u64 == BTRFS)
}

fn data_directory(dir: &Path, on_btrfs: bool) -> Found {
    let dir = dir.display();
    if on_btrfs { ok(format!("{dir} is on btrfs")) } else { missing(format!("{dir} is on another file system")) }
}

/// Mounts a file system nowhere.
fn mount(kind: &str, options: &[(&str, &str)], flags: &[&str]) -> Result<OwnedFd, Errno> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        fsconfig_set_string(&context, *key, *value)?;
    }
    for flag in flags {
        fsconfig_set_flag(&context, *flag)?;
    }
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}

fn refused(what: &str, error: Errno) -> Found {
    missing(format!("{what}: {}", std::io::Error::from(error)))
}

fn overlay() -> Found {
    let Ok(dir) = tempfile::tempdir() else { return degraded("not tried: no temporary directory") };
    let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    // The upper directory must not be on overlay itself: a tmpfs would do, but only where it is attached.
    for name in ["lower", "upper", "work"] {
        if let Err(error) = std::fs::create_dir(dir.path().join(name)) {
            return degraded(format!("not tried: {error}"));
        }
    }
    let (lower, upper, work) = (path("lower"), path("upper"), path("work"));
    match mount("overlay", &[("lowerdir+", &lower), ("upperdir", &upper), ("workdir", &work)], &[]) {
        Ok(_) => ok("mounted and released"),
        Err(Errno::INVAL) => match mount("overlay", &[("lowerdir+", &lower), ("lowerdir+", &upper)], &[]) {
            Ok(_) => degraded("read-only works; the file system of the temporary directory takes no upper directory"),
            Err(error) => refused("mounting", error),
        },
        Err(error) => refused("mounting", error),
    }
}

/// Maps a directory's ids through a user namespace and puts an overlay over it, as each sandbox does.
fn idmapped() -> Found {
    let Ok(dir) = tempfile::tempdir() else { return degraded("not tried: no temporary directory") };
    let userns = match mapped_namespace() {
        Ok(userns) => userns,
        Err(error) => return degraded(format!("not tried: a user namespace: {error}")),
    };
    match overlay_idmapped(dir.path(), &userns) {
        Ok(_) => ok("mounted and released"),
        Err(error) => refused("mounting", error),
    }
}

fn overlay_idmapped(dir: &Path, userns: &File) -> Result<OwnedFd, Errno> {
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    // A detached mount goes with its descriptor: all are held until the overlay is made.
    let mut held = Vec::new();
    for name in ["a", "b"] {
        let lower = dir.join(name);
        std::fs::create_dir(&lower).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = open_tree(CWD, lower, flags)?;
        corral_sys::mounts::set_attributes(tree.as_fd(), 0, Some(userns.as_fd()))?;
        match fsconfig_set_fd(&context, "lowerdir+", &tree) {
            // Before Linux 6.13 layers are given by path.
            Err(Errno::INVAL) => {
                fsconfig_set_string(&context, "lowerdir+", format!("/proc/self/fd/{}", tree.as_raw_fd()))?;
            }
            other => other?,
        }
        held.push(tree);
    }
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}

/// A user namespace whose root is user 100,000 here. It lives as long as its descriptor.
fn mapped_namespace() -> std::io::Result<File> {
    // cat holds the namespace open until its input ends.
    let mut child =
        Command::new("unshare").args(["--user", "cat"]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    let opened = map_namespace(&Path::new("/proc").join(child.id().to_string()));
    drop(child.stdin.take());
    child.wait()?;
    opened
}

fn map_namespace(child: &Path) -> std::io::Result<File> {
    let own = std::fs::read_link("/proc/self/ns/user")?;
    let deadline = Instant::now() + Duration::from_secs(2);
    while std::fs::read_link(child.join("ns/user"))? == own {
        if Instant::now() > deadline {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    for file in ["uid_map", "gid_map"] {
        std::fs::write(child.join(file), "0 100000 65536\n")?;
    }
    File::open(child.join("ns/user"))
}

fn known(kind: &str) -> Found {
    let listed = || read("/proc/filesystems").is_some_and(|text| text.split_whitespace().any(|name| name == kind));
    if listed() {
        return ok("in /proc/filesystems");
    }
    // Opening a file system by name loads its module.
    match fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC) {
        Ok(_) => ok("loaded on demand"),
        Err(error) => refused("opening the file system", error),
    }
}

fn erofs_known() -> Found {
    known("erofs")
}

/// Writes an empty layer and mounts its files themselves (Linux 6.12).
fn erofs_file() -> Found {
    use corral_format::erofs::{Kind, Meta, Node, Tree, write};
    let Ok(dir) = tempfile::tempdir_in("/var/tmp") else { return degraded("not tried: no temporary directory") };
    let (image, data) = (dir.path().join("meta"), dir.path().join("data"));
    let mut tree = Tree::new();
    tree.add(Node { meta: Meta { mode: 0o40755, ..Meta::default() }, kind: Kind::Directory(Vec::new()) });
    let Ok(bytes) = write(&tree, 0) else { return degraded("not tried: no image can be made") };
    if let Err(error) = std::fs::write(&image, bytes).and_then(|()| std::fs::write(&data, [])) {
        return degraded(format!("not tried: {error}"));
    }
    let (image, data) = (image.to_string_lossy(), data.to_string_lossy());
    match mount("erofs", &[("source", &image), ("device", &data)], &["ro"]) {
        Ok(_) => ok("mounted and released"),
        Err(Errno::NOTBLK) => missing("the kernel wants a block device (file-backed since Linux 6.12)"),
        Err(error) => refused("mounting", error),
    }
}

/// Mounts an automounter with a pipe of its own, as the keeper does for terminals.
fn autofs() -> Found {
    let (_read, write) = match pipe_with(PipeFlags::CLOEXEC | PipeFlags::DIRECT) {
        Ok(pipe) => pipe,
        Err(error) => return degraded(format!("not tried: a pipe: {}", std::io::Error::from(error))),
    };
    let (fd, group) = (write.as_raw_fd().to_string(), rustix::process::getpgrp().as_raw_nonzero().to_string());
    let options = [("fd", &*fd), ("pgrp", &*group), ("minproto", "5"), ("maxproto", "5")];
    match mount("autofs", &options, &["indirect"]) {
        Ok(_) => ok("mounted and released"),
        Err(error) => refused("mounting", error),
    }
}

fn loops() -> Found {
    if !Path::new("/dev/loop-control").exists() {
        return missing("no /dev/loop-control");
    }
    match std::fs::OpenOptions::new().read(true).write(true).open("/dev/loop-control") {
        Ok(_) => ok("/dev/loop-control opens"),
        Err(error) => missing(format!("/dev/loop-control: {error}")),
    }
}

/// Mounts a tmpfs and maps its ids through a user namespace (Linux 6.3).
fn tmpfs() -> Found {
    let userns = match mapped_namespace() {
        Ok(userns) => userns,
        Err(error) => return degraded(format!("not tried: a user namespace: {error}")),
    };
    let mapped = mount("tmpfs", &[("size", "1M")], &[])
        .and_then(|tmpfs| corral_sys::mounts::set_attributes(tmpfs.as_fd(), 0, Some(userns.as_fd())));
    match mapped {
        Ok(()) => ok("mapped and released"),
        Err(error) => refused("mapping its ids", error),
    }
}
