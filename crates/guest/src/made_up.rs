//! Files that the kernel makes up as they are read: they have no size, or a wrong one.

use crate::paths::refused;
use crate::protocol::{OpError, OpErrorKind};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;

/// Most bytes of one. Those that go on for ever are of no use as a file.
const MOST: u64 = 16 << 20;

/// The file systems of such files (linux/magic.h): proc, sysfs, cgroup, cgroup2 and mqueue.
const FILE_SYSTEMS: [u64; 5] = [0x9fa0, 0x6265_6572, 0x0027_e0eb, 0x6367_7270, 0x1980_0202];

/// Whether this is one.
pub fn holds(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|found| FILE_SYSTEMS.contains(&(found.f_type as u64)))
}

/// Its bytes, read in one go: another read may find others.
pub fn read(path: &str, file: &mut File) -> Result<Vec<u8>, OpError> {
    let mut bytes = Vec::new();
    // Whatever it says, neither the disk nor the platform has failed.
    let refuse =
        |e: std::io::Error| refused(OpErrorKind::WrongType, path, &format!("the kernel does not give it: {e}"));
    file.take(MOST + 1).read_to_end(&mut bytes).map_err(refuse)?;
    if bytes.len() as u64 > MOST {
        let why = "the kernel makes it up and it has more than 16 MiB: read what you need with a command";
        return Err(refused(OpErrorKind::WrongType, path, why));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_up_files_are_told_from_others() {
        assert!(holds(File::open("/proc/self/status").unwrap()));
        assert!(!holds(File::open("/bin/sh").unwrap()));
        let bytes = read("/proc/self/cmdline", &mut File::open("/proc/self/cmdline").unwrap()).unwrap();
        assert!(!bytes.is_empty());
        let endless = read("/dev/zero", &mut File::open("/dev/zero").unwrap()).unwrap_err();
        assert_eq!(endless.kind, OpErrorKind::WrongType);
    }
}
