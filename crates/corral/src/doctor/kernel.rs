//! Namespaces, security modules, limits and tools.

use super::{Found, Row, degraded, missing, needed, ok, useful};
use rustix::process::{Resource, getrlimit};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Oldest kernel with what sandboxes need: tmpfs with mapped ids (6.3), overlay layers one by one (6.8), EROFS mounted
/// from a file (6.12).
const OLDEST: (u32, u32) = (6, 12);
/// What the lack of something costs that only later versions are to use.
const UNUSED: &str = "nothing: it is not used yet";
/// Descriptors for some thousands of sandboxes.
const OPEN_FILES: u64 = 20_000;
const PIDS: u64 = 100_000;

pub(super) fn rows() -> Vec<Row> {
    vec![
        needed("kernel", "layers and root file systems cannot be mounted", kernel()),
        needed("root", "mounts and cgroups cannot be made", root()),
        needed("user namespaces", "no sandbox can be isolated", namespaces(&["--user", "--map-root-user"])),
        needed(
            "namespaces",
            "no sandbox can be isolated",
            namespaces(&["--mount", "--pid", "--fork", "--net", "--ipc", "--uts", "--cgroup"]),
        ),
        needed("seccomp", "system calls of sandboxes cannot be filtered", seccomp()),
        useful("landlock", UNUSED, landlock()),
        useful("apparmor", UNUSED, apparmor()),
        useful("kvm", UNUSED, kvm()),
        useful("psi", UNUSED, psi()),
        useful("fanotify", UNUSED, fanotify()),
        useful("zram", UNUSED, zram()),
        useful("open files", "fewer sandboxes at a time", open_files()),
        useful("pid_max", "fewer processes at a time", number("/proc/sys/kernel/pid_max", PIDS)),
    ]
}

pub(super) fn read(path: impl AsRef<Path>) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Kernel release as two numbers.
pub(super) fn release() -> Option<(u32, u32)> {
    let name = rustix::system::uname();
    let mut parts = name.release().to_str().ok()?.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn kernel() -> Found {
    let name = rustix::system::uname();
    let text = name.release().to_string_lossy().into_owned();
    match release() {
        Some(release) if release >= OLDEST => ok(text),
        _ => missing(format!("{text}: {}.{} or later is needed", OLDEST.0, OLDEST.1)),
    }
}

fn root() -> Found {
    if rustix::process::geteuid().is_root() { ok("effective user 0") } else { missing("run as root") }
}

/// Enters the namespaces with unshare(1) and runs a program there.
fn namespaces(options: &[&str]) -> Found {
    let tried = Command::new("unshare").args(options).arg("true").stdin(Stdio::null()).output();
    match tried {
        Ok(output) if output.status.success() => ok(format!("unshare {}", options.join(" "))),
        Ok(output) => missing(String::from_utf8_lossy(&output.stderr).trim().chars().take(120).collect::<String>()),
        Err(error) => degraded(format!("not tried: unshare: {error}")),
    }
}

fn seccomp() -> Found {
    match read("/proc/sys/kernel/seccomp/actions_avail") {
        Some(actions) if actions.contains("errno") && actions.contains("kill_process") => ok(actions),
        Some(actions) => missing(format!("actions: {actions}")),
        None => missing("no /proc/sys/kernel/seccomp"),
    }
}

fn lsm(name: &str) -> bool {
    read("/sys/kernel/security/lsm").is_some_and(|list| list.split(',').any(|one| one == name))
}

fn landlock() -> Found {
    if lsm("landlock") {
        return ok("in the list of active modules");
    }
    if read("/sys/kernel/security/lsm").is_none() {
        return degraded("securityfs is not mounted: not known");
    }
    missing("not among the active modules")
}

fn apparmor() -> Found {
    match read("/sys/module/apparmor/parameters/enabled").as_deref() {
        Some("Y") => ok("enabled"),
        _ => missing("not enabled"),
    }
}

fn kvm() -> Found {
    let device = Path::new("/dev/kvm");
    if !device.exists() {
        return missing("no /dev/kvm");
    }
    match std::fs::OpenOptions::new().read(true).write(true).open(device) {
        Ok(_) => degraded("/dev/kvm opens; no machine was tried"),
        Err(error) => degraded(format!("/dev/kvm: {error}")),
    }
}

fn psi() -> Found {
    match std::fs::read_to_string("/proc/pressure/memory") {
        Ok(text) if text.starts_with("some") => ok("/proc/pressure/memory"),
        Ok(_) => degraded("/proc/pressure/memory is empty"),
        Err(error) => missing(format!("/proc/pressure/memory: {error}")),
    }
}

/// Pre-content events came with Linux 6.14; they cannot be asked for without a system call of their own.
fn fanotify() -> Found {
    match release() {
        Some(release) if release >= (6, 14) => degraded("the kernel is new enough for pre-content events; not probed"),
        _ => missing("pre-content events need Linux 6.14"),
    }
}

fn zram() -> Found {
    if Path::new("/sys/class/zram-control").exists() {
        return ok("loaded");
    }
    match modules().map(|dir| dir.join("kernel/drivers/block/zram")) {
        Some(dir) if dir.exists() => degraded("the module is there, not loaded"),
        _ => missing("no module"),
    }
}

fn modules() -> Option<PathBuf> {
    let name = rustix::system::uname();
    Some(Path::new("/lib/modules").join(name.release().to_str().ok()?))
}

fn open_files() -> Found {
    let hard = getrlimit(Resource::Nofile).maximum;
    match hard {
        Some(limit) if limit < OPEN_FILES => degraded(format!("hard limit {limit}: {OPEN_FILES} are advised")),
        Some(limit) => ok(format!("hard limit {limit}")),
        None => ok("unlimited"),
    }
}

fn number(path: &str, advised: u64) -> Found {
    match read(path).and_then(|text| text.parse::<u64>().ok()) {
        Some(value) if value < advised => degraded(format!("{value}: {advised} are advised")),
        Some(value) => ok(value.to_string()),
        None => missing(format!("{path} cannot be read")),
    }
}

/// Runs the tool for its version.
pub(super) fn tool(name: &str, package: &str) -> Found {
    let asked = Command::new(name).arg("--version").stdin(Stdio::null()).output();
    match asked {
        Ok(output) => {
            let text = if output.stdout.is_empty() { output.stderr } else { output.stdout };
            let text = String::from_utf8_lossy(&text);
            ok(text.lines().next().unwrap_or(name).trim().chars().take(60).collect::<String>())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => missing(format!("not found: install {package}")),
        Err(error) => missing(format!("{name}: {error}")),
    }
}
