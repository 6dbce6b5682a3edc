//! What every process of a sandbox is confined by: capabilities, no_new_privs, a seccomp filter, and its cores.

use crate::protocol::Step;
use corral_sys::seccomp::Instruction;
use corral_sys::{identity, seccomp};
use rustix::io::Errno;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use std::collections::BTreeMap;

/// System calls refused with EPERM whatever their arguments. Docker's default profile is the model: what loads code
/// into the kernel, changes mounts, clocks, keys or swap, or opens large attack surfaces that few programs need.
const REFUSED: &[i64] = &[
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_ioperm,
    libc::SYS_iopl,
    libc::SYS_kcmp,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_lookup_dcookie,
    libc::SYS_migrate_pages,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_move_pages,
    libc::SYS_nfsservctl,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pivot_root,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_uselib,
    libc::SYS_userfaultfd,
    libc::SYS_ustat,
    libc::SYS_vhangup,
    libc::SYS__sysctl,
];

/// Every flag of clone(2) and unshare(2) that makes a namespace.
const NAMESPACE_FLAGS: [u64; 8] = [
    libc::CLONE_NEWNS as u64,
    libc::CLONE_NEWCGROUP as u64,
    libc::CLONE_NEWUTS as u64,
    libc::CLONE_NEWIPC as u64,
    libc::CLONE_NEWUSER as u64,
    libc::CLONE_NEWPID as u64,
    libc::CLONE_NEWNET as u64,
    0x80, // CLONE_NEWTIME; in clone(2) these bits are part of the exit signal
];

/// First system call number that this filter does not know: answered with ENOSYS, as by an older kernel.
const FIRST_UNKNOWN: u32 = 463;

/// The program loaded into every process of a sandbox.
#[derive(Debug, Clone)]
pub struct Filter(Vec<Instruction>);

/// The filter could not be built.
#[derive(Debug, thiserror::Error)]
#[error("the seccomp filter cannot be built")]
pub struct FilterError(#[source] seccompiler::BackendError);

impl Filter {
    /// Builds the program: one, since every process's copy takes memory.
    ///
    /// # Errors
    /// When the rules do not compile, which the tests rule out.
    pub fn build() -> Result<Self, FilterError> {
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> = REFUSED.iter().map(|call| (*call, vec![])).collect();
        let mut refuse_when = |call: i64, arg: u8, len: Len, op: Op, value: u64| -> Result<(), FilterError> {
            let condition = SeccompCondition::new(arg, len, op, value).map_err(FilterError)?;
            rules.entry(call).or_default().push(SeccompRule::new(vec![condition]).map_err(FilterError)?);
            Ok(())
        };
        for flag in NAMESPACE_FLAGS {
            refuse_when(libc::SYS_unshare, 0, Len::Qword, Op::MaskedEq(flag), flag)?;
            if flag > 0xff {
                refuse_when(libc::SYS_clone, 0, Len::Qword, Op::MaskedEq(flag), flag)?;
            }
        }
        // Kernel crypto, host-guest sockets and IPsec keys: not namespaced, or of no use inside.
        for family in [libc::AF_ALG, libc::AF_VSOCK, libc::AF_KEY] {
            refuse_when(libc::SYS_socket, 0, Len::Dword, Op::Eq, family as u64)?;
        }
        // Typing into another's terminal.
        for request in [libc::TIOCSTI, libc::TIOCLINUX] {
            refuse_when(libc::SYS_ioctl, 1, Len::Dword, Op::Eq, request)?;
        }
        Ok(Self(unknown_calls().into_iter().chain(by_range(rules)?).collect()))
    }

    /// Loads it into the calling thread.
    ///
    /// # Errors
    /// Those of seccomp(2).
    pub fn load(&self) -> Result<(), Errno> {
        seccomp::load(&self.0)
    }
}

/// The rules as several programs, each for a range of call numbers, behind jumps to the right one.
///
/// Loading a filter, the kernel runs it once for every call number to learn which need no filter at all. In one list a
/// number passes all rules before it, and a load takes 190 µs, for every process started; in ranges a fraction of that.
fn by_range(rules: BTreeMap<i64, Vec<SeccompRule>>) -> Result<Vec<Instruction>, FilterError> {
    const RANGES: usize = 8;
    const JUMP: u16 = 0x05;
    const JUMP_GREATER_EQUAL: u16 = 0x35;
    let per_range = rules.len().div_ceil(RANGES);
    let mut rest = rules;
    let mut programs: Vec<(u32, Vec<Instruction>)> = Vec::new();
    while let Some((&first, _)) = rest.first_key_value() {
        let next = rest.keys().nth(per_range).copied();
        let later = next.map_or_else(BTreeMap::new, |next| rest.split_off(&next));
        let refuse = SeccompAction::Errno(libc::EPERM as u32);
        let filter = SeccompFilter::new(rest, SeccompAction::Allow, refuse, TargetArch::x86_64).map_err(FilterError)?;
        let program: BpfProgram = filter.try_into().map_err(FilterError)?;
        let program = program.iter().map(|i| Instruction { code: i.code, jt: i.jt, jf: i.jf, k: i.k }).collect();
        programs.push((first as u32, program));
        rest = later;
    }
    // The accumulator holds the call number. The highest range is asked for first; what is left falls into the lowest.
    let mut all = Vec::new();
    let jumps = (programs.len() - 1) * 2;
    for (index, (first, _)) in programs.iter().enumerate().skip(1).rev() {
        all.push(Instruction { code: JUMP_GREATER_EQUAL, jt: 0, jf: 1, k: *first });
        let start: usize = jumps + programs[..index].iter().map(|(_, p)| p.len()).sum::<usize>();
        all.push(Instruction { code: JUMP, jt: 0, jf: 0, k: (start - all.len() - 1) as u32 });
    }
    all.extend(programs.into_iter().flat_map(|(_, program)| program));
    Ok(all)
}

/// ENOSYS for clone3, whose flags a filter cannot see (C libraries fall back to clone), for the numbers of the x32 ABI
/// and for calls newer than this filter. What is not answered falls through to what follows.
fn unknown_calls() -> Vec<Instruction> {
    const LOAD_WORD: u16 = 0x20;
    const JUMP_GREATER_EQUAL: u16 = 0x35;
    const JUMP_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const ERRNO: u32 = 0x0005_0000;
    let op = |code, jt, jf, k| Instruction { code, jt, jf, k };
    vec![
        op(LOAD_WORD, 0, 0, 0),
        op(JUMP_GREATER_EQUAL, 1, 0, FIRST_UNKNOWN),
        op(JUMP_EQUAL, 0, 1, libc::SYS_clone3 as u32),
        op(RETURN, 0, 0, ERRNO | libc::ENOSYS as u32),
    ]
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_compiles_and_every_jump_stays_inside() {
        let Filter(program) = Filter::build().unwrap();
        assert!(program.len() > REFUSED.len() && program.len() < 4096);
        for (at, i) in program.iter().enumerate() {
            if i.code & 0x07 == 0x05 {
                let furthest = if i.code == 0x05 { i.k as usize } else { usize::from(i.jt.max(i.jf)) };
                assert!(at + 1 + furthest < program.len(), "{at}");
            }
        }
    }
}
