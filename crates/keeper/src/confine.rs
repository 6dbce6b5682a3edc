//! What every process of a sandbox is confined by: capabilities, no_new_privs, a seccomp filter, and its cores.

use crate::filter::Filter;
use crate::protocol::Step;
use corral_sys::identity;
use rustix::io::Errno;

/// Confines the calling process, which is root with all capabilities in the sandbox's user namespace, and makes it
/// this user.
///
/// # Errors
/// The step that failed.
pub fn become_user(
    filter: &Filter,
    uid: u32,
    gid: u32,
    groups: &[u32],
    allow_setuid: bool,
) -> Result<(), (Step, Errno)> {
    let privileges = |e| (Step::Privileges, e);
    identity::limit_bounding_set(identity::SANDBOX_CAPABILITIES).map_err(privileges)?;
    identity::set_groups(groups).map_err(|e| (Step::Identity, e))?;
    if !allow_setuid {
        rustix::thread::set_no_new_privs(true).map_err(privileges)?;
    }
    filter.load().map_err(|e| (Step::Seccomp, e))?;
    identity::set_all(uid, gid).map_err(|e| (Step::Identity, e))?;
    let keep = if uid == 0 { identity::SANDBOX_CAPABILITIES } else { 0 };
    identity::set_capabilities(keep).map_err(privileges)
}

/// Runs the calling thread, and what it starts, on these cores; on all when empty.
///
/// # Errors
/// Those of sched_setaffinity(2).
pub fn set_affinity(cores: &[u16]) -> Result<(), Errno> {
    if cores.is_empty() {
        return Ok(());
    }
    let mut set = rustix::thread::CpuSet::new();
    for core in cores {
        set.set(usize::from(*core));
    }
    rustix::thread::sched_setaffinity(None, &set)
}
