//! What keeps a process that the memory of others depends on from waiting for memory itself.

use rustix::mm::MlockAllFlags;

/// Keeps this process's memory, lets it allocate without waiting for I/O that it may have to do itself, and asks the
/// kernel to end others first. What is refused is logged and done without. Called before threads are started, which
/// inherit it.
pub fn protect(oom_score_adj: i32) {
    // Only what is touched: stacks and arenas are reserved in sizes that are never used.
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    let locked = rustix::mm::mlockall(flags).map_err(|e| format!("its memory may be swapped: {e}"));
    let flusher = rustix::process::configure_io_flusher_behavior(true);
    let flusher = flusher.map_err(|e| format!("it may wait for input and output to have memory: {e}"));
    let spared = std::fs::write("/proc/self/oom_score_adj", oom_score_adj.to_string());
    let spared = spared.map_err(|e| format!("it may be ended when memory is short: {e}"));
    let refused: Vec<String> = [locked, flusher, spared].into_iter().filter_map(Result::err).collect();
    if !refused.is_empty() {
        tracing::warn!("this process is not protected: {}", refused.join("; "));
    }
}
