//! cgroups: which version, which controllers, and whether groups can be made.

use super::kernel::read;
use super::{Found, Row, State, degraded, missing, needed, ok, useful};
use std::path::{Path, PathBuf};

/// What limits sandboxes.
const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];

pub(super) fn rows() -> Vec<Row> {
    let (v2, v1) = (unified(), legacy());
    let either = match (&v2.0, &v1.0) {
        (State::Ok, _) => ok("version 2"),
        (_, State::Ok) => ok("version 1"),
        (State::Missing, State::Missing) => missing("neither version limits memory, cpu and pids"),
        _ => degraded("some limits cannot be set"),
    };
    vec![
        needed("cgroups", "no limit of a sandbox can be set", either),
        useful("cgroup v2", "no memory.high, no freezing in one step, no kill of whole groups", v2),
        useful("cgroup v1", "nothing, where version 2 is complete", v1),
        useful("cgroup freezer", "sandboxes cannot be paused", freezer()),
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

fn freezer() -> Found {
    if mounts("cgroup").iter().any(|(_, options)| options.split(',').any(|o| o == "freezer")) {
        return ok("version 1");
    }
    let Some((root, _)) = mounts("cgroup2").into_iter().next() else { return missing("no cgroups are mounted") };
    match try_group(&root) {
        Ok(group) => {
            let there = group.join("cgroup.freeze").exists();
            match std::fs::remove_dir(&group) {
                Ok(()) if there => ok("version 2"),
                Ok(()) => missing("no cgroup.freeze"),
                Err(error) => degraded(format!("{}: {error}", group.display())),
            }
        }
        Err(error) => missing(format!("{}: {error}", root.display())),
    }
}
