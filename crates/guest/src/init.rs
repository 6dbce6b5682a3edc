//! The first process of a container: reaps orphans until the sandbox is ended from outside.

/// Waits for children for ever. The kernel shields this process from signals of the sandbox.
pub fn run() -> ! {
    let Ok(children) = corral_sys::process::signal_fd(&[libc::SIGCHLD]) else { std::process::exit(1) };
    let flags = rustix::io::ioctl_fionbio(&children, false);
    if flags.is_err() {
        std::process::exit(1);
    }
    let mut info = [0u8; 128];
    loop {
        while let Ok(Some(_)) = corral_sys::fork::try_reap_any() {}
        if rustix::io::read(&children, &mut info).is_err_and(|e| e != rustix::io::Errno::INTR) {
            std::process::exit(1);
        }
    }
}
