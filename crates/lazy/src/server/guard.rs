//! What keeps a process that the memory of others depends on from waiting for memory itself.

use rustix::mm::MlockAllFlags;

/// Keeps this process's memory, lets it allocate without waiting for I/O that it may have to do itself, and asks the
/// kernel to end others first. What is refused is logged and done without. Called before threads are started, which
/// inherit it.
pub fn protect(oom_score_adj: i32) {
    // Only what is touched: stacks and arenas are reserved in sizes that are never used.
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    if let Err(error) = rustix::mm::mlockall(flags) {
        tracing::warn!(%error, "memory may be swapped");
    }
    if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::warn!(%error, "allocations may wait for input and output");
    }
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", oom_score_adj.to_string()) {
        tracing::warn!(%error, "it may be ended when memory is short");
    }
}
