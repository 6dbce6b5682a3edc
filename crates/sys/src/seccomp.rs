//! Loading a seccomp filter into the calling thread.

use crate::check;
use rustix::io::Errno;

/// One BPF instruction, `struct sock_filter`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instruction {
    /// Operation.
    pub code: u16,
    /// Jump if true.
    pub jt: u8,
    /// Jump if false.
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

#[repr(C)]
struct Program {
    len: u16,
    filter: *const Instruction,
}

/// Loads a filter (seccomp(2), SECCOMP_SET_MODE_FILTER). Needs no_new_privs or CAP_SYS_ADMIN in the user namespace.
///
/// # Errors
/// Those of seccomp(2); EINVAL for a program longer than 65,535 instructions.
pub fn load(filter: &[Instruction]) -> Result<(), Errno> {
    let len = u16::try_from(filter.len()).map_err(|_| Errno::INVAL)?;
    let program = Program { len, filter: filter.as_ptr() };
    // SAFETY: the program points to `len` instructions of the layout the kernel expects; it copies them.
    check(unsafe { libc::syscall(libc::SYS_seccomp, 1, 0, &raw const program) })?;
    Ok(())
}
