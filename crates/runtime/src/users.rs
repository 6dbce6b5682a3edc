//! Users and groups, read from the sandbox's own /etc/passwd and /etc/group without running anything of it.

use crate::RuntimeError;
use corral_guest::patience::patiently;
use corral_guest::protocol::{OpError, OpErrorKind};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;
use std::fs::File;
use std::io::Read;

/// Most bytes of either file that are read.
const MAX_BYTES: u64 = 1 << 20;

/// Who a command runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Home directory.
    pub home: String,
    /// Name, for `USER`; the number when it has none.
    pub name: String,
}

impl User {
    /// Root, for whom nothing need be looked up.
    pub fn root() -> Self {
        Self { uid: 0, gid: 0, groups: Vec::new(), home: "/root".into(), name: "root".into() }
    }
}

/// Finds `user`, `uid`, `user:group` or `uid:gid` in the sandbox whose first process has this id. Reads files; blocks.
///
/// # Errors
/// When a name is unknown, or the sandbox is gone.
pub fn find(init: i32, wanted: &str) -> Result<User, RuntimeError> {
    if wanted.is_empty() || wanted == "root" || wanted == "0" || wanted == "0:0" || wanted == "root:root" {
        return Ok(User::root());
    }
    let root_path = format!("/proc/{init}/root");
    let root = openat(CWD, &root_path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|_| RuntimeError::Gone)?;
    let read = |path| match read_small(&root, path) {
        // Somebody in the sandbox holds a lease on it: who the user is cannot be told.
        Err(Errno::AGAIN) => Err(RuntimeError::File(OpError {
            kind: OpErrorKind::Busy,
            message: format!("/{path}: a process of the sandbox holds it (a lease); try again"),
        })),
        other => Ok(other.unwrap_or_default()),
    };
    resolve(wanted, &read("etc/passwd")?, || read("etc/group"))
}

fn read_small(root: &impl std::os::fd::AsFd, path: &str) -> Result<String, Errno> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let open = |flags| patiently(|| openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve));
    if FileType::from_raw_mode(rustix::fs::fstat(open(OFlags::PATH)?)?.st_mode) != FileType::RegularFile {
        return Err(Errno::INVAL);
    }
    let file = open(OFlags::RDONLY | OFlags::NONBLOCK)?;
    let mut bytes = Vec::new();
    File::from(file).take(MAX_BYTES).read_to_end(&mut bytes).map_err(|_| Errno::IO)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn resolve(
    wanted: &str,
    passwd: &str,
    group_file: impl Fn() -> Result<String, RuntimeError>,
) -> Result<User, RuntimeError> {
    let unknown = || RuntimeError::UnknownUser(wanted.chars().take(80).collect());
    let (name, group) = match wanted.split_once(':') {
        Some((name, group)) => (name, Some(group)),
        None => (wanted, None),
    };
    let number = name.parse::<u32>().ok();
    let entry = passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let [login, _, uid, gid, _, home, ..] = fields.as_slice() else { return None };
        let uid = uid.parse::<u32>().ok()?;
        let fits = if let Some(number) = number { number == uid } else { *login == name };
        fits.then(|| ((*login).to_owned(), uid, gid.parse::<u32>().unwrap_or(0), (*home).to_owned()))
    });
    let (login, uid, mut gid, home) = match (entry, number) {
        (Some(entry), _) => entry,
        (None, Some(uid)) => (uid.to_string(), uid, 0, "/".to_owned()),
        (None, None) => return Err(unknown()),
    };
    let mut groups = Vec::new();
    if let Some(group) = group {
        gid = match group.parse::<u32>() {
            Ok(gid) => gid,
            Err(_) => group_lines(&group_file()?).find(|g| g.0 == group).map(|g| g.1).ok_or_else(unknown)?,
        };
    } else {
        groups = group_lines(&group_file()?).filter(|g| g.2.contains(&login)).map(|g| g.1).collect();
    }
    if [uid, gid].into_iter().chain(groups.iter().copied()).any(|id| id >= corral_keeper::launch::IDS_PER_SANDBOX) {
        return Err(unknown());
    }
    Ok(User { uid, gid, groups, home, name: login })
}

fn group_lines(text: &str) -> impl Iterator<Item = (String, u32, Vec<String>)> {
    text.lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let [name, _, gid, members, ..] = fields.as_slice() else { return None };
            Some(((*name).to_owned(), gid.parse().ok()?, members.split(',').map(str::to_owned).collect()))
        })
        .collect::<Vec<_>>()
        .into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\nbroken\nbig:x:70000:1::/:\n";
    const GROUP: &str = "root:x:0:\nalice:x:1000:\ndocker:x:999:bob,alice\n";

    fn find(wanted: &str) -> Result<User, RuntimeError> {
        resolve(wanted, PASSWD, || Ok(GROUP.to_owned()))
    }

    #[test]
    fn names_numbers_and_groups() {
        let alice = find("alice").unwrap();
        assert_eq!(
            (alice.uid, alice.gid, alice.groups.as_slice(), alice.home.as_str()),
            (1000, 1000, &[999][..], "/home/alice")
        );
        assert_eq!(find("1000").unwrap(), alice);
        let odd = find("4242:docker").unwrap();
        assert_eq!((odd.uid, odd.gid, odd.home.as_str()), (4242, 999, "/"));
        assert_eq!(find("alice:7").unwrap().gid, 7);
    }

    #[test]
    fn unknown_and_unmappable_are_refused() {
        for bad in ["mallory", "alice:nobodies", "broken", "70000", "big", "-1"] {
            assert!(matches!(find(bad), Err(RuntimeError::UnknownUser(_))), "{bad}");
        }
    }
}
