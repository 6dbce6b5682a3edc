//! Making processes with clone3, from a process that has one thread.

use crate::check;
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Proof that this process has a single thread, so that a child of it may run any code: no lock can be held by
/// another thread at the moment of the fork.
#[derive(Debug, Clone, Copy)]
pub struct SingleThreaded(());

impl SingleThreaded {
    /// Looks at `/proc/self/status`.
    ///
    /// Whoever holds the token must not start threads afterwards; `Copy` lets the children of the process use it too.
    ///
    /// # Errors
    /// When the process has more than one thread, or `/proc` cannot be read.
    pub fn observe() -> Result<Self, std::io::Error> {
        let status = std::fs::read_to_string("/proc/self/status")?;
        let threads = status.lines().find_map(|l| l.strip_prefix("Threads:")).map(str::trim);
        if threads == Some("1") {
            Ok(Self(()))
        } else {
            Err(std::io::Error::other(format!(
                "this process has {} threads",
                threads.unwrap_or("an unknown number of")
            )))
        }
    }
}

/// Flags for [`clone_child`], as in clone(2).
pub mod flags {
    /// Own mount namespace.
    pub const NEWNS: u64 = libc::CLONE_NEWNS as u64;
    /// Own cgroup namespace.
    pub const NEWCGROUP: u64 = libc::CLONE_NEWCGROUP as u64;
    /// Own UTS namespace.
    pub const NEWUTS: u64 = libc::CLONE_NEWUTS as u64;
    /// Own IPC namespace.
    pub const NEWIPC: u64 = libc::CLONE_NEWIPC as u64;
    /// Own user namespace.
    pub const NEWUSER: u64 = libc::CLONE_NEWUSER as u64;
    /// Own process namespace.
    pub const NEWPID: u64 = libc::CLONE_NEWPID as u64;
    /// Own network namespace.
    pub const NEWNET: u64 = libc::CLONE_NEWNET as u64;
    /// The caller's parent becomes the child's parent.
    pub const PARENT: u64 = libc::CLONE_PARENT as u64;
}

/// `struct clone_args` of linux/sched.h, version 2.
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Makes a child that runs `child` on a copy of this process's memory and ends with the status it returns.
///
/// Returns the child's process id as this process sees it. With a `cgroup` (a v2 directory) the child begins life in it.
///
/// # Errors
/// Those of clone3(2).
pub fn clone_child(
    _proof: SingleThreaded,
    flags: u64,
    cgroup: Option<BorrowedFd<'_>>,
    child: impl FnOnce() -> i32,
) -> Result<i32, Errno> {
    let mut args = CloneArgs { flags, ..CloneArgs::default() };
    if flags & flags::PARENT == 0 {
        args.exit_signal = libc::SIGCHLD as u64;
    }
    if let Some(fd) = cgroup {
        const INTO_CGROUP: u64 = 0x2_0000_0000;
        args.flags |= INTO_CGROUP;
        args.cgroup = fd.as_raw_fd() as u64;
    }
    // SAFETY: `args` is a valid clone_args without CLONE_VM, stack or pointers, so the child continues here on a copy of
    // the memory, as after fork(2). The token says that no other thread existed that could hold a lock.
    let pid = check(unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<CloneArgs>()) })?;
    if pid == 0 {
        let status = child();
        // SAFETY: _exit ends the process without running destructors of the parent's copy.
        unsafe { libc::_exit(status) }
    }
    Ok(pid as i32)
}

/// How a child ended and what it used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChildExit {
    /// Which child.
    pub pid: i32,
    /// Exit code, when it exited.
    pub code: Option<i32>,
    /// Signal, when one ended it.
    pub signal: Option<i32>,
    /// User and system CPU time of it and of the children it waited for, in microseconds.
    pub cpu_us: u64,
    /// Largest resident set, in KiB.
    pub peak_rss_kib: u64,
}

fn wait(pid: i32, options: i32) -> Result<Option<ChildExit>, Errno> {
    let mut status = 0;
    // SAFETY: rusage is a plain C struct for which all zeroes is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: both pointers are to live locals of the right types.
        let got = unsafe { libc::wait4(pid, &raw mut status, options, &raw mut usage) };
        match got {
            0 => return Ok(None),
            -1 => match crate::last_errno() {
                Errno::INTR => continue,
                Errno::CHILD => return Ok(None),
                other => return Err(other),
            },
            // A child that asked to be traced (ptrace(2), PTRACE_TRACEME) has stopped, and not ended.
            pid if libc::WIFSTOPPED(status) => let_go(pid, libc::WSTOPSIG(status)),
            pid => {
                let micros = |t: libc::timeval| (t.tv_sec as u64) * 1_000_000 + t.tv_usec as u64;
                return Ok(Some(ChildExit {
                    pid,
                    code: libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)),
                    signal: libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status)),
                    cpu_us: micros(usage.ru_utime) + micros(usage.ru_stime),
                    peak_rss_kib: usage.ru_maxrss as u64,
                }));
            }
        }
    }
}

/// Stops tracing a child that made this process its tracer, and lets it have the signal it stopped for.
fn let_go(pid: i32, signal: i32) {
    // The trap of an execve is for the tracer only.
    let signal = if signal == libc::SIGTRAP { 0 } else { signal };
    // SAFETY: PTRACE_DETACH takes no pointers; the last argument is a signal number. It fails when the child has died.
    unsafe { libc::ptrace(libc::PTRACE_DETACH, pid, std::ptr::null_mut::<libc::c_void>(), i64::from(signal)) };
}

/// Waits until a child ends.
///
/// # Errors
/// Those of wait4(2).
pub fn wait_for(pid: i32) -> Result<Option<ChildExit>, Errno> {
    wait(pid, 0)
}

/// Reaps one child that has ended, if there is one.
///
/// # Errors
/// Those of wait4(2).
pub fn try_reap_any() -> Result<Option<ChildExit>, Errno> {
    wait(-1, libc::WNOHANG)
}
