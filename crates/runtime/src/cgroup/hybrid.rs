//! v1 controllers for the limits, the v2 tree for killing, freezing and CPU time.

use super::{CgroupDriver, Layout, list_dirs, make_dir, quota_us, read_number, remove_tree, value_in, write};
use crate::RuntimeError;
use corral_api::environment::Limits;
use corral_api::sandbox::SandboxStats;
use rustix::fs::{CWD, Mode, OFlags};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// The hybrid layout of systemd's transition time and of many container hosts.
#[derive(Debug)]
pub struct Hybrid {
    unified: PathBuf,
    cpu: PathBuf,
    memory: PathBuf,
    pids: PathBuf,
}

impl Hybrid {
    /// Makes the node's directory in each tree.
    ///
    /// # Errors
    /// When one cannot be made.
    pub fn open(layout: Layout, base: &str) -> Result<Self, RuntimeError> {
        let tree = |name: &str| {
            let found = layout.v1.iter().find(|(controller, _)| controller == name);
            found
                .map(|(_, path)| path.join(base))
                .ok_or_else(|| RuntimeError::Unsupported(format!("no {name} controller")))
        };
        let driver = Self {
            unified: layout.unified.join(base),
            cpu: tree("cpu")?,
            memory: tree("memory")?,
            pids: tree("pids")?,
        };
        for dir in driver.trees() {
            make_dir(dir)?;
        }
        Ok(driver)
    }

    fn trees(&self) -> [&PathBuf; 4] {
        [&self.unified, &self.cpu, &self.memory, &self.pids]
    }
}

impl CgroupDriver for Hybrid {
    fn create(&self, sandbox: &str, limits: &Limits) -> Result<(), RuntimeError> {
        let made = (|| {
            for tree in self.trees() {
                make_dir(&tree.join(sandbox))?;
            }
            let memory = u64::from(limits.memory_mib) << 20;
            write(&self.memory.join(sandbox).join("memory.limit_in_bytes"), &memory.to_string())?;
            // Buffers of sockets are charged to nobody in v1 unless this is set, and then to a counter of their own.
            let sockets = self.memory.join(sandbox).join("memory.kmem.tcp.limit_in_bytes");
            if sockets.exists() {
                write(&sockets, &(memory / 2).to_string())?;
            }
            write(&self.pids.join(sandbox).join("pids.max"), &limits.pids.to_string())?;
            write(&self.cpu.join(sandbox).join("cpu.cfs_quota_us"), &quota_us(limits.cpus).to_string())?;
            if limits.cpu_weight != Limits::default().cpu_weight {
                let shares = (u64::from(limits.cpu_weight) * 1024 / 100).max(2);
                write(&self.cpu.join(sandbox).join("cpu.shares"), &shares.to_string())?;
            }
            Ok(())
        })();
        if made.is_err() {
            self.remove(sandbox).unwrap_or(());
        }
        made
    }

    fn entrances(&self, sandbox: &str) -> Result<Vec<OwnedFd>, RuntimeError> {
        [&self.cpu, &self.memory, &self.pids]
            .into_iter()
            .map(|tree| {
                let path = tree.join(sandbox).join("cgroup.procs");
                rustix::fs::openat(CWD, &path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
                    .map_err(|e| RuntimeError::host("open", path, e))
            })
            .collect()
    }

    fn unified_dir(&self, sandbox: &str) -> PathBuf {
        self.unified.join(sandbox)
    }

    fn stats(&self, sandbox: &str) -> Result<SandboxStats, RuntimeError> {
        let path = self.unified.join(sandbox).join("cpu.stat");
        let cpu = std::fs::read_to_string(&path).map_err(|e| RuntimeError::host("read", path, e))?;
        let memory = self.memory.join(sandbox);
        Ok(SandboxStats {
            cpu_ms: value_in(&cpu, "usage_usec").unwrap_or(0) / 1000,
            memory_bytes: read_number(&memory.join("memory.usage_in_bytes")),
            memory_peak_bytes: read_number(&memory.join("memory.max_usage_in_bytes")),
            pids: read_number(&self.pids.join(sandbox).join("pids.current")),
            disk_bytes: 0,
            oom_kills: self.oom_kills(sandbox),
            ..SandboxStats::default()
        })
    }

    fn oom_kills(&self, sandbox: &str) -> u64 {
        let text = std::fs::read_to_string(self.memory.join(sandbox).join("memory.oom_control")).unwrap_or_default();
        value_in(&text, "oom_kill").unwrap_or(0)
    }

    fn remove(&self, sandbox: &str) -> Result<(), RuntimeError> {
        // The v2 directory last: as long as it is there the sandbox is found again.
        for tree in [&self.cpu, &self.memory, &self.pids, &self.unified] {
            remove_tree(&tree.join(sandbox))?;
        }
        Ok(())
    }

    fn list(&self) -> Result<Vec<String>, RuntimeError> {
        let mut all = Vec::new();
        for tree in self.trees() {
            all.extend(list_dirs(tree)?);
        }
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }

    fn remove_base(&self) -> Result<(), RuntimeError> {
        for tree in self.trees() {
            remove_tree(tree)?;
        }
        Ok(())
    }
}
