//! What other processes have open.

use std::path::Path;

/// The number of a descriptor by which a process has open what a test says.
pub(crate) fn open_as(pid: i32, is_wanted: impl Fn(&Path) -> bool) -> Option<i32> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut wanted = fds.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| is_wanted(&to)));
    wanted.next()?.file_name().to_str()?.parse().ok()
}
