//! Owners of `--chown`, by the image's own `/etc/passwd` and `/etc/group`.

/// Numbers of a user and a group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Owner {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// A name that the image does not know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("--chown: the image has no {sort} {name:?}")]
pub struct UnknownOwner {
    sort: &'static str,
    name: String,
}

/// The largest id of a sandbox.
const MAX_ID: u32 = 65_535;

/// The numbers of `user`, `uid`, `user:group` or `uid:gid`. Without a group it is that of the user in `passwd`, or for a
/// number the same number.
///
/// # Errors
/// A name is unknown, or a number is larger than sandboxes have.
pub fn owner(text: &str, passwd: &str, group: &str) -> Result<Owner, UnknownOwner> {
    let unknown = |sort, name: &str| UnknownOwner { sort, name: crate::words::shown(name) };
    let number = |name: &str| name.parse::<u32>().ok().filter(|n| *n <= MAX_ID);
    let (user_name, group_name) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (text, None),
    };
    let user = match number(user_name) {
        Some(uid) => Some((uid, uid)),
        None => passwd.lines().find_map(|line| match line.split(':').collect::<Vec<_>>().as_slice() {
            [name, _, uid, gid, ..] if *name == user_name => Some((number(uid)?, number(gid)?)),
            _ => None,
        }),
    };
    let (uid, gid) = user.ok_or_else(|| unknown("user", user_name))?;
    let Some(group_name) = group_name else { return Ok(Owner { uid, gid }) };
    let found = number(group_name).or_else(|| {
        group.lines().find_map(|line| match line.split(':').collect::<Vec<_>>().as_slice() {
            [name, _, gid, ..] if *name == group_name => number(gid),
            _ => None,
        })
    });
    Ok(Owner { uid, gid: found.ok_or_else(|| unknown("group", group_name))? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers() {
        let find = |text| owner(text, "root:x:0:0::\nagent:x:1000:1001::\n", "extra:x:2000:\n").map(|o| (o.uid, o.gid));
        assert_eq!(find("agent"), Ok((1000, 1001)));
        assert_eq!(find("agent:extra"), Ok((1000, 2000)));
        assert_eq!(find("55"), Ok((55, 55)));
        assert_eq!(find("55:66"), Ok((55, 66)));
        assert_eq!(find("0:extra"), Ok((0, 2000)));
        for bad in ["nobody", "agent:none", "", "99999", ":", "-1"] {
            assert!(find(bad).is_err(), "{bad}");
        }
    }
}
