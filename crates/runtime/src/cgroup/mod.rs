//! Limits and process groups of sandboxes, on cgroup v2 or on a hybrid host (v1 controllers beside a v2 tree).
//!
//! Every sandbox has a directory named by its id in each tree used, and in the v2 tree one more per command below it,
//! so that everything a command started can be killed together. The node nests all of it below the cgroups it was
//! itself started in.

mod hybrid;
mod unified;

use crate::RuntimeError;
use corral_api::environment::Limits;
use corral_api::sandbox::SandboxStats;
use std::fmt::Debug;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

pub use hybrid::Hybrid;
pub use unified::Unified;

/// What the two layouts have in common. All calls are a few system calls long; none waits.
pub trait CgroupDriver: Debug + Send + Sync {
    /// Makes a sandbox's cgroups with its limits. Idempotent.
    ///
    /// # Errors
    /// When a directory or limit cannot be written; nothing is left then.
    fn create(&self, sandbox: &str, limits: &Limits) -> Result<(), RuntimeError>;

    /// Files of the v1 trees that a process enters by writing its id; none on a v2 host.
    ///
    /// # Errors
    /// When the sandbox has no cgroups.
    fn entrances(&self, sandbox: &str) -> Result<Vec<OwnedFd>, RuntimeError>;

    /// The sandbox's directory in the v2 tree.
    fn unified_dir(&self, sandbox: &str) -> PathBuf;

    /// CPU, memory and process figures.
    ///
    /// # Errors
    /// When the sandbox has no cgroups.
    fn stats(&self, sandbox: &str) -> Result<SandboxStats, RuntimeError>;

    /// How many processes were killed for want of memory.
    fn oom_kills(&self, sandbox: &str) -> u64;

    /// Removes a sandbox's cgroups; its processes must be gone. Idempotent.
    ///
    /// # Errors
    /// EBUSY while processes are still dying: try again.
    fn remove(&self, sandbox: &str) -> Result<(), RuntimeError>;

    /// Names of all sandboxes that have cgroups.
    ///
    /// # Errors
    /// When a tree cannot be read.
    fn list(&self) -> Result<Vec<String>, RuntimeError>;

    /// Removes the node's own directories once they are empty.
    ///
    /// # Errors
    /// When they are not.
    fn remove_base(&self) -> Result<(), RuntimeError>;
}

/// Makes a command's directory in the v2 tree and opens it.
///
/// # Errors
/// When the sandbox has no cgroups.
pub fn create_command(driver: &dyn CgroupDriver, sandbox: &str, command: &str) -> Result<OwnedFd, RuntimeError> {
    let path = driver.unified_dir(sandbox).join(command);
    make_dir(&path)?;
    open_dir(&path)
}

/// Opens a sandbox's directory in the v2 tree.
///
/// # Errors
/// When the sandbox has no cgroups.
pub fn open_unified(driver: &dyn CgroupDriver, sandbox: &str) -> Result<OwnedFd, RuntimeError> {
    open_dir(&driver.unified_dir(sandbox))
}

/// Kills everything in a sandbox, or everything that one command started. Idempotent.
///
/// # Errors
/// When the kernel refuses.
pub fn kill(driver: &dyn CgroupDriver, sandbox: &str, command: Option<&str>) -> Result<(), RuntimeError> {
    let mut path = driver.unified_dir(sandbox);
    if let Some(command) = command {
        path.push(command);
    }
    write_if_there(&path.join("cgroup.kill"), "1")
}

/// Process ids in a sandbox's cgroup or one command's, those of its commands not included for a sandbox.
pub fn processes(driver: &dyn CgroupDriver, sandbox: &str, command: &str) -> Vec<i32> {
    let path = driver.unified_dir(sandbox).join(command).join("cgroup.procs");
    std::fs::read_to_string(path).unwrap_or_default().lines().filter_map(|l| l.parse().ok()).collect()
}

/// Thread ids in a sandbox, its commands' included.
pub fn threads(driver: &dyn CgroupDriver, sandbox: &str) -> Vec<i32> {
    let top = driver.unified_dir(sandbox);
    let below = list_dirs(&top).unwrap_or_default();
    std::iter::once(top.clone())
        .chain(below.iter().map(|name| top.join(name)))
        .flat_map(|dir| {
            let text = std::fs::read_to_string(dir.join("cgroup.threads")).unwrap_or_default();
            text.lines().filter_map(|l| l.parse().ok()).collect::<Vec<i32>>()
        })
        .collect()
}

/// Freezes or thaws a sandbox.
///
/// # Errors
/// When the kernel refuses.
pub fn set_frozen(driver: &dyn CgroupDriver, sandbox: &str, frozen: bool) -> Result<(), RuntimeError> {
    write(&driver.unified_dir(sandbox).join("cgroup.freeze"), if frozen { "1" } else { "0" })
}

/// Whether every process of a sandbox has stopped running.
pub fn is_frozen(driver: &dyn CgroupDriver, sandbox: &str) -> bool {
    events_value(&driver.unified_dir(sandbox), "frozen") == Some(1)
}

/// Whether any process lives in a sandbox.
pub fn is_populated(driver: &dyn CgroupDriver, sandbox: &str) -> bool {
    events_value(&driver.unified_dir(sandbox), "populated") == Some(1)
}

fn events_value(dir: &Path, key: &str) -> Option<u64> {
    value_in(&std::fs::read_to_string(dir.join("cgroup.events")).ok()?, key)
}

/// Removes a command's directory if nothing of it lives any more.
pub fn remove_command(driver: &dyn CgroupDriver, sandbox: &str, command: &str) -> bool {
    match std::fs::remove_dir(driver.unified_dir(sandbox).join(command)) {
        Ok(()) => true,
        Err(e) => e.kind() == ErrorKind::NotFound,
    }
}

/// Chooses the driver for this host. `base` is the name of the node's directory in every tree.
///
/// # Errors
/// When the host has no usable layout, or the node's directories cannot be made.
pub fn open(base: &str) -> Result<Box<dyn CgroupDriver>, RuntimeError> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")
        .map_err(|e| RuntimeError::host("read", "/proc/self/mountinfo", e))?;
    let own =
        std::fs::read_to_string("/proc/self/cgroup").map_err(|e| RuntimeError::host("read", "/proc/self/cgroup", e))?;
    let layout = Layout::parse(&mounts, &own)?;
    if layout.v1.is_empty() {
        Ok(Box::new(Unified::open(layout, base)?))
    } else {
        Ok(Box::new(Hybrid::open(layout, base)?))
    }
}

/// Where the trees are, and where in them this process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The v2 tree: this process's directory in it.
    unified: PathBuf,
    /// Controllers mounted as v1 trees: name and this process's directory.
    v1: Vec<(String, PathBuf)>,
}

impl Layout {
    fn parse(mounts: &str, own: &str) -> Result<Self, RuntimeError> {
        // Fields of proc_pid_mountinfo(5): … root mount-point … - type source super-options
        let find = |wanted: &dyn Fn(&str, &str) -> bool| {
            mounts.lines().find_map(|line| {
                let (front, back) = line.split_once(" - ")?;
                let front: Vec<&str> = front.split(' ').collect();
                let back: Vec<&str> = back.split(' ').collect();
                let (root, point) = (front.get(3)?, front.get(4)?);
                wanted(back.first()?, back.get(2)?).then(|| ((*root).to_owned(), PathBuf::from(point)))
            })
        };
        // Lines of /proc/self/cgroup: number:controllers:path
        let path_of = |controller: &str| {
            own.lines().find_map(|line| {
                let mut fields = line.splitn(3, ':');
                let (_, list, path) = (fields.next()?, fields.next()?, fields.next()?);
                let fits =
                    if controller.is_empty() { list.is_empty() } else { list.split(',').any(|c| c == controller) };
                fits.then(|| path.to_owned())
            })
        };
        let place = |(root, point): (String, PathBuf), path: &str| {
            let below = path.strip_prefix(root.trim_end_matches('/')).unwrap_or(path);
            point.join(below.trim_start_matches('/'))
        };
        let unified = find(&|kind, _| kind == "cgroup2")
            .zip(path_of(""))
            .map(|(mount, path)| place(mount, &path))
            .ok_or_else(|| RuntimeError::Unsupported("no cgroup v2 tree is mounted".into()))?;
        let mut v1 = Vec::new();
        for controller in ["cpu", "memory", "pids"] {
            if let Some((mount, path)) =
                find(&|kind, options| kind == "cgroup" && options.split(',').any(|o| o == controller))
                    .zip(path_of(controller))
            {
                v1.push((controller.to_owned(), place(mount, &path)));
            }
        }
        if !v1.is_empty() && v1.len() < 3 {
            return Err(RuntimeError::Unsupported(
                "cpu, memory and pids controllers lie in different cgroup versions".into(),
            ));
        }
        Ok(Self { unified, v1 })
    }
}

fn make_dir(path: &Path) -> Result<(), RuntimeError> {
    match std::fs::create_dir(path) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(RuntimeError::host("make", path, e)),
    }
}

fn open_dir(path: &Path) -> Result<OwnedFd, RuntimeError> {
    use rustix::fs::{CWD, Mode, OFlags};
    rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| RuntimeError::host("open", path, e))
}

fn write(path: &Path, value: &str) -> Result<(), RuntimeError> {
    use std::io::Write;
    std::fs::OpenOptions::new()
        .write(true)
        .open(path)
        .and_then(|mut f| f.write_all(value.as_bytes()))
        .map_err(|e| RuntimeError::host("write", path, e))
}

fn write_if_there(path: &Path, value: &str) -> Result<(), RuntimeError> {
    match write(path, value) {
        Err(RuntimeError::Host { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn read_number(path: &Path) -> u64 {
    std::fs::read_to_string(path).ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0)
}

/// The number after a key in a file of `key value` lines.
fn value_in(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Removes a directory with all below it, deepest first; what is not there is fine.
fn remove_tree(path: &Path) -> Result<(), RuntimeError> {
    if std::fs::remove_dir(path).is_ok() {
        return Ok(());
    }
    if let Ok(entries) = std::fs::read_dir(path) {
        for entry in entries.flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                remove_tree(&entry.path())?;
            }
        }
    }
    match std::fs::remove_dir(path) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(RuntimeError::host("remove", path, e)),
    }
}

fn list_dirs(path: &Path) -> Result<Vec<String>, RuntimeError> {
    let entries = std::fs::read_dir(path).map_err(|e| RuntimeError::host("read", path, e))?;
    Ok(entries
        .flatten()
        .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        .filter_map(|e| e.file_name().into_string().ok())
        .collect())
}

/// Microseconds of CPU time that a quota of `cpus` allows in each period of 100 ms.
fn quota_us(cpus: f64) -> u64 {
    ((cpus * 100_000.0) as u64).max(1_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "30 1 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n31 1 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n32 1 0:29 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n33 1 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn layouts() {
        let own = "8:pids:/\n4:memory:/a/b\n1:cpu:/\n0::/\n";
        let layout = Layout::parse(HYBRID, own).unwrap();
        assert_eq!(layout.unified, Path::new("/sys/fs/cgroup/unified/"));
        assert_eq!(layout.v1[1], ("memory".into(), "/sys/fs/cgroup/memory/a/b".into()));
        let v2 = "33 1 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let layout = Layout::parse(v2, "0::/system.slice/corral.service\n").unwrap();
        assert_eq!(layout.unified, Path::new("/sys/fs/cgroup/system.slice/corral.service"));
        assert!(layout.v1.is_empty());
        assert!(Layout::parse("", own).is_err());
    }

    #[test]
    fn values() {
        assert_eq!(value_in("oom 1\noom_kill 3\n", "oom_kill"), Some(3));
        assert_eq!(value_in("oom_kill_disable 0\nunder_oom 0\n", "oom_kill"), None);
        assert_eq!(quota_us(0.5), 50_000);
    }
}
