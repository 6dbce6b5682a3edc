//! What Corral puts into every container: the topmost layer, and the files that show limits instead of the host.
//!
//! The layer holds the mount points and the three files of /etc that name hosts; it is one directory on the host, never
//! written after the start. The files are made once per memory and core count and bound read-only by all containers
//! that have it, so that nothing has to be running for them to be read.

use super::clone_path;
use crate::RuntimeError;
use corral_api::environment::Limits;
use corral_sys::mounts::{attr, set_attributes};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::collections::HashSet;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Host name of containers that ask for none: one for all, so that /etc/hosts can be shared.
pub const DEFAULT_HOSTNAME: &str = "sandbox";

const HOSTS: &str = "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n";
/// No network yet: look-ups are refused at once instead of waiting for an answer.
const RESOLV: &str = "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n";

/// The platform's files in a data directory.
#[derive(Debug)]
pub struct Platform {
    top: PathBuf,
    proc: PathBuf,
    /// Classes whose files are written.
    made: Mutex<HashSet<(u32, u32)>>,
}

impl Platform {
    /// Writes the layer.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn open(data_dir: &Path) -> Result<Self, RuntimeError> {
        let this =
            Self { top: data_dir.join("platform"), proc: data_dir.join("proc"), made: Mutex::new(HashSet::new()) };
        for dir in ["proc", "sys", "dev", "etc"] {
            make_dir(&this.top.join(dir))?;
        }
        make_dir(&this.proc)?;
        ensure_tmpfs(&this.proc)?;
        for (name, text) in [("hosts", HOSTS), ("resolv.conf", RESOLV), ("hostname", "sandbox\n")] {
            put(&this.top.join("etc").join(name), text)?;
        }
        Ok(this)
    }

    /// Unmounts what was mounted; nothing is made from it afterwards.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn detach(&self) -> Result<(), RuntimeError> {
        unmount(&self.proc, UnmountFlags::DETACH).map_err(|e| RuntimeError::host("unmount", &self.proc, e))
    }

    /// The topmost layer, a detached mount.
    ///
    /// # Errors
    /// When it cannot be cloned.
    pub fn top_layer(&self) -> Result<OwnedFd, RuntimeError> {
        clone_path(&self.top)
    }

    /// Files to bind over those of /proc and /sys for these limits: places and detached mounts.
    ///
    /// # Errors
    /// When a file cannot be written or cloned.
    pub fn binds(&self, limits: &Limits) -> Result<(Vec<String>, Vec<OwnedFd>), RuntimeError> {
        let class = (limits.memory_mib, cores(limits.cpus));
        let dir = self.proc.join(format!("{}-{}", class.0, class.1));
        {
            let mut made = self.made.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if !made.contains(&class) {
                make_dir(&dir)?;
                for (_, name, text) in files(class.0, class.1)? {
                    put(&dir.join(name), &text)?;
                }
                made.insert(class);
            }
        }
        let mut places = Vec::new();
        let mut mounts = Vec::new();
        for (place, name) in PLACES {
            places.push(place.to_owned());
            let mount = clone_path(&dir.join(name))?;
            let all = attr::RDONLY | attr::NOSUID | attr::NODEV | attr::NOEXEC;
            set_attributes(mount.as_fd(), all, None).map_err(|e| RuntimeError::host("restrict", dir.join(name), e))?;
            mounts.push(mount);
        }
        Ok((places, mounts))
    }
}

/// Mounts a small tmpfs over a directory, unless one is there: what is bound into containers must not name the host's
/// disk or tell how full it is.
fn ensure_tmpfs(path: &Path) -> Result<(), RuntimeError> {
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    if rustix::fs::statfs(path).is_ok_and(|s| s.f_type == TMPFS_MAGIC) {
        return Ok(());
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("tmpfs", path, "tmpfs", flags, Some(c"mode=0755,size=16m"))
        .map_err(|e| RuntimeError::host("mount a tmpfs at", path, e))
}

/// Whole cores that a quota shows as.
pub fn cores(cpus: f64) -> u32 {
    cpus.ceil().max(1.0) as u32
}

const PLACES: [(&str, &str); 3] =
    [("proc/meminfo", "meminfo"), ("proc/cpuinfo", "cpuinfo"), ("sys/devices/system/cpu/online", "online")];

fn files(memory_mib: u32, cores: u32) -> Result<[(&'static str, &'static str, String); 3], RuntimeError> {
    let host = fs::read_to_string("/proc/cpuinfo").map_err(|e| RuntimeError::host("read", "/proc/cpuinfo", e))?;
    let mut blocks: Vec<&str> = host.split("\n\n").filter(|b| !b.trim().is_empty()).collect();
    blocks.truncate(cores as usize);
    let cpuinfo = blocks.iter().fold(String::new(), |mut all, block| {
        all.push_str(block);
        all.push_str("\n\n");
        all
    });
    let online = if cores == 1 { "0\n".to_owned() } else { format!("0-{}\n", cores - 1) };
    let [meminfo_at, cpuinfo_at, online_at] = PLACES;
    Ok([
        (meminfo_at.0, meminfo_at.1, meminfo(memory_mib)),
        (cpuinfo_at.0, cpuinfo_at.1, cpuinfo),
        (online_at.0, online_at.1, online),
    ])
}

/// Total is the limit. What is free changes with every allocation and is told by the cgroup, not by this file: it shows
/// what an idle sandbox has.
fn meminfo(memory_mib: u32) -> String {
    let total = u64::from(memory_mib) * 1024;
    [
        ("MemTotal", total),
        ("MemFree", total),
        ("MemAvailable", total),
        ("Buffers", 0),
        ("Cached", 0),
        ("SwapCached", 0),
        ("Active", 0),
        ("Inactive", 0),
        ("SwapTotal", 0),
        ("SwapFree", 0),
        ("Shmem", 0),
        ("Slab", 0),
    ]
    .map(|(key, kib)| format!("{:<16}{kib:>8} kB\n", format!("{key}:")))
    .concat()
}

fn make_dir(path: &Path) -> Result<(), RuntimeError> {
    fs::create_dir_all(path)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o755)))
        .map_err(|e| RuntimeError::host("make", path, e))
}

fn put(path: &Path, text: &str) -> Result<(), RuntimeError> {
    let part = path.with_extension("part");
    fs::write(&part, text)
        .and_then(|()| fs::set_permissions(&part, fs::Permissions::from_mode(0o644)))
        .and_then(|()| fs::rename(&part, path))
        .map_err(|e| RuntimeError::host("write", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_cores_and_memory() {
        assert_eq!((cores(0.25), cores(1.0), cores(1.5)), (1, 1, 2));
        assert!(meminfo(512).starts_with("MemTotal:         524288 kB\n"), "{}", meminfo(512));
        let [_, cpuinfo, online] = files(64, 1).unwrap();
        assert_eq!(cpuinfo.2.matches("processor\t").count(), 1);
        assert_eq!(online.2, "0\n");
    }
}
