//! First process of a container: reaps orphans until the sandbox is ended from outside.
//!
//! Without the standard library, since every live sandbox has one: two pages of its own instead of sixteen. It stands
//! here because making system calls without a library is unsafe. Built by `make programs` with `--features init`.
#![no_std]
#![no_main]

use core::arch::asm;

const SYS_RT_SIGPROCMASK: usize = 14;
const SYS_WAIT4: usize = 61;
const SYS_RT_SIGTIMEDWAIT: usize = 128;
const SYS_EXIT: usize = 60;
const SIG_BLOCK: usize = 0;
/// Set of SIGCHLD alone, as the kernel has it: bit n - 1.
const SIGCHLD_SET: u64 = 1 << (17 - 1);

/// A system call with four arguments.
///
/// # Safety
/// Pointers among the arguments must be what the call expects.
unsafe fn call(number: usize, a: usize, b: usize, c: usize, d: usize) -> isize {
    let result: isize;
    // SAFETY: the x86-64 system call convention; rcx and r11 are overwritten by the instruction.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// Where the kernel begins.
#[unsafe(no_mangle)]
extern "C" fn _start() -> ! {
    let all = u64::MAX;
    let child = SIGCHLD_SET;
    // SAFETY: the sets are live words of the size that is passed; wait4 and rt_sigtimedwait take null for what is not
    // wanted.
    unsafe {
        call(SYS_RT_SIGPROCMASK, SIG_BLOCK, &raw const all as usize, 0, 8);
        loop {
            if call(SYS_WAIT4, usize::MAX, 0, 0, 0) < 0 {
                // No child: a blocked SIGCHLD stays pending, so one that comes now is not missed.
                call(SYS_RT_SIGTIMEDWAIT, &raw const child as usize, 0, 0, 8);
            }
        }
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {
        // SAFETY: exit takes an integer and does not return.
        unsafe { call(SYS_EXIT, 1, 0, 0, 0) };
    }
}
