//! cgroups: limits of either version, and the version 2 tree by which sandboxes are killed and frozen.

use super::kernel::read;
use super::{Found, Row, State, degraded, missing, needed, ok, useful};
use std::path::{Path, PathBuf};

/// What limits sandboxes.
const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];

pub(super) fn rows() -> Vec<Row> {
    let (v2, v1) = (unified(), legacy());
    // The node takes version 1 controllers where there are any.
    let limits = match (v1.0, v2.0) {
        (State::Ok, _) => ok(format!("version 1: {}", v1.1)),
        (_, State::Ok) => ok(format!("version 2: {}", v2.1)),
        (State::Missing, State::Missing) => missing(format!("version 1: {}; version 2: {}", v1.1, v2.1)),
        _ => degraded(format!("version 1: {}; version 2: {}", v1.1, v2.1)),
    };
    vec![
        needed("cgroup limits", "no limit of a sandbox can be set", limits),
        needed("cgroup kill", "no command can be killed with all it started", in_unified("cgroup.kill")),
        useful("cgroup freezer", "sandboxes cannot be paused", in_unified("cgroup.freeze")),
    ]
}

fn mounts(kind: &str) -> Vec<(PathBuf, String)> {
    let text = read("/proc/self/mounts").unwrap_or_default();
    let of = |line: &str| {
        let fields: Vec<&str> = line.split(' ').collect();
        (fields.get(2) == Some(&kind)).then(|| (fields[1].into(), fields.get(3).copied().unwrap_or("").to_owned()))
    };
    text.lines().filter_map(of).collect()
}

/// Makes a group and removes it.
fn try_group(parent: &Path) -> Result<PathBuf, std::io::Error> {
    let group = parent.join(format!("corral-doctor-{}", std::process::id()));
    std::fs::create_dir(&group)?;
    Ok(group)
}

fn unified() -> Found {
    let Some((root, _)) = mounts("cgroup2").into_iter().next() else { return missing("not mounted") };
    let have = read(root.join("cgroup.controllers")).unwrap_or_default();
    let lacking: Vec<_> = CONTROLLERS.into_iter().filter(|c| !have.split(' ').any(|h| h == *c)).collect();
    let group = match try_group(&root) {
        Ok(group) => group,
        Err(error) => return missing(format!("{}: {error}", root.display())),
    };
    let inside = read(group.join("cgroup.controllers")).unwrap_or_default();
    let removed = std::fs::remove_dir(&group);
    if let Err(error) = removed {
        return degraded(format!("{}: {error}", group.display()));
    }
    if lacking.is_empty() {
        let told = CONTROLLERS.iter().all(|c| inside.split(' ').any(|i| i == *c));
        let how = if told { "delegated to groups" } else { "not yet delegated: the node switches them on" };
        return ok(format!("{have}; {how}"));
    }
    missing(format!("{} has no {}", root.display(), lacking.join(", ")))
}

fn legacy() -> Found {
    let mounted = mounts("cgroup");
    if mounted.is_empty() {
        return missing("not mounted");
    }
    let of = |name: &str| mounted.iter().find(|(_, options)| options.split(',').any(|o| o == name));
    let lacking: Vec<_> = CONTROLLERS.into_iter().filter(|name| of(name).is_none()).collect();
    if !lacking.is_empty() {
        return missing(format!("no {}", lacking.join(", ")));
    }
    for name in CONTROLLERS {
        let Some((root, _)) = of(name) else { continue };
        match try_group(root).and_then(std::fs::remove_dir) {
            Ok(()) => {}
            Err(error) => return missing(format!("{}: {error}", root.display())),
        }
    }
    ok("memory, cpu, pids: groups can be made")
}

/// Whether groups of the version 2 tree have a file.
fn in_unified(file: &str) -> Found {
    let Some((root, _)) = mounts("cgroup2").into_iter().next() else { return missing("no version 2 tree is mounted") };
    let group = match try_group(&root) {
        Ok(group) => group,
        Err(error) => return missing(format!("{}: {error}", root.display())),
    };
    let there = group.join(file).exists();
    match std::fs::remove_dir(&group) {
        Ok(()) if there => ok(format!("{file} in the version 2 tree")),
        Ok(()) => missing(format!("no {file}")),
        Err(error) => degraded(format!("{}: {error}", group.display())),
    }
}
