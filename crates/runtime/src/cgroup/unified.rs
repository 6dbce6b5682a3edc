//! cgroup v2 alone: the layout of current distributions.

use super::{CgroupDriver, Layout, list_dirs, make_dir, quota_us, read_number, remove_tree, value_in, write};
use crate::RuntimeError;
use corral_api::environment::Limits;
use corral_api::sandbox::SandboxStats;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// The v2 layout. The node must be alone in its cgroup's inner node: it moves itself into a leaf first.
#[derive(Debug)]
pub struct Unified {
    base: PathBuf,
}

const CONTROLLERS: &str = "+cpu +memory +pids";

impl Unified {
    /// Makes the node's directory and delegates the controllers to it.
    ///
    /// # Errors
    /// When the controllers are not delegated to this process's cgroup.
    pub fn open(layout: Layout, base: &str) -> Result<Self, RuntimeError> {
        let parent = layout.unified;
        let driver = Self { base: parent.join(base) };
        make_dir(&driver.base)?;
        if write(&parent.join("cgroup.subtree_control"), CONTROLLERS).is_err() {
            // A cgroup with processes cannot hand controllers on (no internal processes): step aside.
            let leaf = parent.join("corral-agent");
            make_dir(&leaf)?;
            write(&leaf.join("cgroup.procs"), "0")?;
            write(&parent.join("cgroup.subtree_control"), CONTROLLERS)?;
        }
        write(&driver.base.join("cgroup.subtree_control"), CONTROLLERS)?;
        Ok(driver)
    }
}

impl CgroupDriver for Unified {
    fn create(&self, sandbox: &str, limits: &Limits) -> Result<(), RuntimeError> {
        let dir = self.base.join(sandbox);
        let made = (|| {
            make_dir(&dir)?;
            write(&dir.join("memory.max"), &(u64::from(limits.memory_mib) << 20).to_string())?;
            write(&dir.join("pids.max"), &limits.pids.to_string())?;
            write(&dir.join("cpu.max"), &format!("{} 100000", quota_us(limits.cpus)))?;
            if limits.cpu_weight != Limits::default().cpu_weight {
                write(&dir.join("cpu.weight"), &limits.cpu_weight.to_string())?;
            }
            Ok(())
        })();
        if made.is_err() {
            self.remove(sandbox).unwrap_or(());
        }
        made
    }

    fn entrances(&self, _sandbox: &str) -> Result<Vec<OwnedFd>, RuntimeError> {
        Ok(Vec::new())
    }

    fn unified_dir(&self, sandbox: &str) -> PathBuf {
        self.base.join(sandbox)
    }

    fn stats(&self, sandbox: &str) -> Result<SandboxStats, RuntimeError> {
        let dir = self.base.join(sandbox);
        let path = dir.join("cpu.stat");
        let cpu = std::fs::read_to_string(&path).map_err(|e| RuntimeError::host("read", path, e))?;
        Ok(SandboxStats {
            cpu_ms: value_in(&cpu, "usage_usec").unwrap_or(0) / 1000,
            memory_bytes: read_number(&dir.join("memory.current")),
            memory_peak_bytes: read_number(&dir.join("memory.peak")),
            pids: read_number(&dir.join("pids.current")),
            disk_bytes: 0,
            oom_kills: self.oom_kills(sandbox),
            ..SandboxStats::default()
        })
    }

    fn oom_kills(&self, sandbox: &str) -> u64 {
        let text = std::fs::read_to_string(self.base.join(sandbox).join("memory.events")).unwrap_or_default();
        value_in(&text, "oom_kill").unwrap_or(0)
    }

    fn remove(&self, sandbox: &str) -> Result<(), RuntimeError> {
        remove_tree(&self.base.join(sandbox))
    }

    fn list(&self) -> Result<Vec<String>, RuntimeError> {
        list_dirs(&self.base)
    }

    fn remove_base(&self) -> Result<(), RuntimeError> {
        remove_tree(&self.base)
    }
}
