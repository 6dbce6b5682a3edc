//! Replacing the program of a process, and its signal state.

use crate::{check, last_errno};
use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

fn pointers(list: &[CString]) -> Vec<*const libc::c_char> {
    list.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
}

/// execve(2): returns only when it fails.
pub fn exec(program: &CStr, argv: &[CString], env: &[CString]) -> Errno {
    let (argv, env) = (pointers(argv), pointers(env));
    // SAFETY: both arrays end with a null pointer and point into strings that outlive the call.
    unsafe { libc::execve(program.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    last_errno()
}

/// Executes the file behind a descriptor: returns only when it fails.
pub fn exec_fd(program: BorrowedFd<'_>, argv: &[CString], env: &[CString]) -> Errno {
    let (argv, env) = (pointers(argv), pointers(env));
    // SAFETY: as for execve; an empty path with AT_EMPTY_PATH names the descriptor itself.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            program.as_raw_fd(),
            c"".as_ptr(),
            argv.as_ptr(),
            env.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    };
    last_errno()
}

/// Takes a descriptor that this process inherited when it was executed. It closes at the next exec from here on.
///
/// # Errors
/// EBADF for one that is not open, was taken already, or is a standard stream.
pub fn inherited(number: i32) -> Result<OwnedFd, Errno> {
    // SAFETY: fcntl with these commands takes and gives integers.
    let flags = check(unsafe { libc::fcntl(number, libc::F_GETFD) }.into())? as i32;
    // What this process opens itself closes at exec: one that does not is inherited, and nobody's yet.
    if number <= 2 || flags & libc::FD_CLOEXEC != 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: as above.
    check(unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) }.into())?;
    // SAFETY: it is open, and no other owner exists, as said above.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Turns address space randomization off for the program that the calling thread executes next.
///
/// # Errors
/// Those of personality(2).
pub fn fix_addresses() -> Result<(), Errno> {
    // SAFETY: personality takes an integer.
    check(unsafe { libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong) }.into()).map(|_| ())
}

/// Gives every signal its default action and unblocks all: what a new program expects.
///
/// # Errors
/// Those of rt_sigprocmask(2).
pub fn reset_signals() -> Result<(), Errno> {
    // SAFETY: sigset_t and signal numbers are plain data; a refused number (SIGKILL, SIGSTOP) is left as it is.
    unsafe {
        for signal in 1..=64 {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        check(libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()).into())?;
    }
    Ok(())
}

/// A descriptor that becomes readable when one of these signals arrives; they are blocked for this thread.
///
/// # Errors
/// Those of signalfd(2).
pub fn signal_fd(signals: &[i32]) -> Result<std::os::fd::OwnedFd, Errno> {
    use std::os::fd::FromRawFd;
    // SAFETY: the set lives through the calls; the returned descriptor is new and owned by nobody else.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        check(libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()).into())?;
        let fd = check(libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK).into())?;
        Ok(std::os::fd::OwnedFd::from_raw_fd(fd as i32))
    }
}

/// Sends a signal to one process.
///
/// # Errors
/// Those of kill(2).
pub fn kill(pid: i32, signal: i32) -> Result<(), Errno> {
    if pid <= 1 {
        return Err(Errno::SRCH);
    }
    // SAFETY: integers only; a group or everything cannot be named, since pid > 1.
    check(unsafe { libc::kill(pid, signal) }.into())?;
    Ok(())
}

/// Closes every descriptor from `first` up.
///
/// # Errors
/// Those of close_range(2).
pub fn close_from(first: u32) -> Result<(), Errno> {
    // SAFETY: the callers are processes about to run another program; no owner of these descriptors is used again.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) })?;
    Ok(())
}

/// Makes `fd` also known under the number `target`, without close-on-exec.
///
/// # Errors
/// Those of dup2(2).
pub fn place_fd(fd: BorrowedFd<'_>, target: i32) -> Result<(), Errno> {
    if fd.as_raw_fd() == target {
        // SAFETY: fcntl on a live descriptor with an integer argument.
        check(unsafe { libc::fcntl(target, libc::F_SETFD, 0) }.into())?;
        return Ok(());
    }
    // SAFETY: the process that calls this is about to run another program and owns its whole descriptor table.
    check(unsafe { libc::dup2(fd.as_raw_fd(), target) }.into())?;
    Ok(())
}

/// Takes over a descriptor that the parent process left open under a known number.
///
/// Returns nothing when the number is not open.
pub fn inherited_fd(number: i32) -> Option<std::os::fd::OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: fcntl on any number is harmless.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: it is open, and by the contract between parent and child nothing else in this process owns it.
    Some(unsafe { std::os::fd::OwnedFd::from_raw_fd(number) })
}

/// Refuses ptrace and /proc access by others, whatever their user (PR_SET_DUMPABLE).
///
/// # Errors
/// Those of prctl(2).
pub fn set_not_dumpable() -> Result<(), Errno> {
    // SAFETY: prctl with integer arguments.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }.into())?;
    Ok(())
}

/// Sets a resource limit by its number (`RLIMIT_NOFILE` and so on), soft and hard alike.
///
/// # Errors
/// Those of setrlimit(2).
pub fn set_limit(resource: u32, value: u64) -> Result<(), Errno> {
    let limit = libc::rlimit64 { rlim_cur: value, rlim_max: value };
    // SAFETY: the pointer is to a live struct of the right type, nothing is written back.
    check(unsafe {
        libc::syscall(libc::SYS_prlimit64, 0, resource, &raw const limit, std::ptr::null::<libc::rlimit64>())
    })?;
    Ok(())
}

/// Number of RLIMIT_NOFILE.
pub const LIMIT_NOFILE: u32 = 7;
/// Number of RLIMIT_CORE.
pub const LIMIT_CORE: u32 = 4;

/// Closes every descriptor above 2 that is not in `keep`.
///
/// # Errors
/// Those of close_range(2).
pub fn close_all_but(keep: &[i32]) -> Result<(), Errno> {
    let mut keep: Vec<u32> = keep.iter().filter(|fd| **fd > 2).map(|fd| *fd as u32).collect();
    keep.sort_unstable();
    let mut next = 3u32;
    for fd in keep {
        if fd > next {
            // SAFETY: as for `close_from`: the caller is about to run another program.
            check(unsafe { libc::syscall(libc::SYS_close_range, next, fd - 1, 0) })?;
        }
        next = fd + 1;
    }
    close_from(next)
}

/// Gives this process its own mount namespace.
///
/// # Errors
/// Those of unshare(2).
pub fn own_mount_namespace() -> Result<(), Errno> {
    // SAFETY: a mount namespace has no bearing on memory safety.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) }.into())?;
    Ok(())
}

/// Gives this process its own, empty network namespace.
///
/// # Errors
/// Those of unshare(2).
pub fn own_network_namespace() -> Result<(), Errno> {
    // SAFETY: a network namespace has no bearing on memory safety.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) }.into())?;
    Ok(())
}

/// Gives this process its own cgroup namespace, rooted at the cgroups it is in.
///
/// # Errors
/// Those of unshare(2).
pub fn own_cgroup_namespace() -> Result<(), Errno> {
    // SAFETY: a cgroup namespace has no bearing on memory safety.
    check(unsafe { libc::unshare(libc::CLONE_NEWCGROUP) }.into())?;
    Ok(())
}
