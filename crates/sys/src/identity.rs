//! User ids and capabilities of the calling thread, set by the raw system calls (glibc's wrappers act on all threads).

use crate::check;
use rustix::io::Errno;

/// Sets the effective user and group id alone.
///
/// # Errors
/// Those of setresuid(2) and setresgid(2).
pub fn set_effective(uid: u32, gid: u32) -> Result<(), Errno> {
    // SAFETY: setresgid and setresuid take integers only; -1 leaves an id as it is.
    unsafe {
        check(libc::syscall(libc::SYS_setresgid, -1, gid, -1))?;
        check(libc::syscall(libc::SYS_setresuid, -1, uid, -1))?;
    }
    Ok(())
}

/// Becomes this user for good: real, effective and saved ids, group first.
///
/// # Errors
/// Those of setresuid(2) and setresgid(2).
pub fn set_all(uid: u32, gid: u32) -> Result<(), Errno> {
    // SAFETY: as above, integers only.
    unsafe {
        check(libc::syscall(libc::SYS_setresgid, gid, gid, gid))?;
        check(libc::syscall(libc::SYS_setresuid, uid, uid, uid))?;
    }
    Ok(())
}

/// Sets the user and group the kernel uses for file access. The calls report no errors.
pub fn set_filesystem(uid: u32, gid: u32) {
    // SAFETY: integers only; the calls return the former value.
    unsafe {
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
    }
}

/// Sets the supplementary groups.
///
/// # Errors
/// Those of setgroups(2).
pub fn set_groups(groups: &[u32]) -> Result<(), Errno> {
    // SAFETY: pointer and length describe the slice, gid_t is u32.
    check(unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) })?;
    Ok(())
}

/// Numbers of the capabilities that a sandbox's root keeps: Docker's default set (capabilities(7)).
pub const SANDBOX_CAPABILITIES: u64 = (1 << 0) // CAP_CHOWN
    | (1 << 1) // CAP_DAC_OVERRIDE
    | (1 << 3) // CAP_FOWNER
    | (1 << 4) // CAP_FSETID
    | (1 << 5) // CAP_KILL
    | (1 << 6) // CAP_SETGID
    | (1 << 7) // CAP_SETUID
    | (1 << 8) // CAP_SETPCAP
    | (1 << 10) // CAP_NET_BIND_SERVICE
    | (1 << 13) // CAP_NET_RAW
    | (1 << 18) // CAP_SYS_CHROOT
    | (1 << 27) // CAP_MKNOD
    | (1 << 29) // CAP_AUDIT_WRITE
    | (1 << 31); // CAP_SETFCAP

/// Takes every capability outside `keep` out of the bounding set. Needs CAP_SETPCAP.
///
/// # Errors
/// Those of prctl(PR_CAPBSET_DROP).
pub fn limit_bounding_set(keep: u64) -> Result<(), Errno> {
    for cap in 0..64 {
        if keep & (1 << cap) != 0 {
            continue;
        }
        // SAFETY: prctl with integer arguments.
        let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, cap as libc::c_ulong, 0, 0, 0) };
        match check(result.into()) {
            Ok(_) => {}
            // Past the last capability this kernel knows.
            Err(Errno::INVAL) => break,
            Err(other) => return Err(other),
        }
    }
    Ok(())
}

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Sets the effective and permitted capabilities of this thread; nothing stays inheritable.
///
/// # Errors
/// Those of capset(2).
pub fn set_capabilities(caps: u64) -> Result<(), Errno> {
    let header = CapHeader { version: 0x2008_0522, pid: 0 };
    let half = |v: u32| CapData { effective: v, permitted: v, inheritable: 0 };
    let data = [half(caps as u32), half((caps >> 32) as u32)];
    // SAFETY: version 3 of the header goes with two data records.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) })?;
    Ok(())
}

/// Keeps the capabilities over changes of user ids (SECBIT_NO_SETUID_FIXUP).
///
/// # Errors
/// Those of prctl(PR_SET_SECUREBITS).
pub fn keep_capabilities_over_setuid(keep: bool) -> Result<(), Errno> {
    let bits: libc::c_ulong = if keep { 1 << 2 } else { 0 };
    // SAFETY: prctl with integer arguments.
    check(unsafe { libc::prctl(libc::PR_SET_SECUREBITS, bits, 0, 0, 0) }.into())?;
    Ok(())
}
