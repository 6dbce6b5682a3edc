//! The data directory: made where missing, used by one process at a time.

use crate::cli::UpArgs;
use anyhow::Context as _;
use rustix::fs::{FlockOperation, flock};
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The file that is locked.
const LOCK: &str = "lock";
/// What tells that a directory is Corral's: the second alone is one that begins with what a backup kept.
const SIGNS: [&str; 2] = [LOCK, CATALOGUE];
/// The gateway's database.
pub const CATALOGUE: &str = "catalogue.sqlite";

/// A locked data directory. The lock goes with the process, so that a crash leaves none behind.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    _lock: File,
    _temporary: Option<tempfile::TempDir>,
}

impl DataDir {
    /// Opens the directory of the arguments, or a temporary one.
    ///
    /// # Errors
    /// It cannot be made, or another process uses it.
    pub fn of(args: &UpArgs) -> anyhow::Result<Self> {
        if args.ephemeral {
            let made = tempfile::Builder::new().prefix("corral-").tempdir_in("/var/tmp");
            let temporary = made.context("cannot make a temporary directory in /var/tmp")?;
            let path = temporary.path().to_owned();
            return Ok(Self { _lock: lock(&path)?, path, _temporary: Some(temporary) });
        }
        Self::open(&args.data_dir)
    }

    /// Opens a directory that stays.
    ///
    /// # Errors
    /// It cannot be made, others may write in it, or another process uses it.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let path = std::path::absolute(path).context("the data directory has no absolute path")?;
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&path);
        made.with_context(|| format!("cannot make the data directory {}", path.display()))?;
        close_to_others(&path)?;
        Ok(Self { _lock: lock(&path)?, path, _temporary: None })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Keys, logs and layers lie in it: what others may have put there is not to be trusted, and reading is not for them.
fn close_to_others(dir: &Path) -> anyhow::Result<()> {
    let found = std::fs::metadata(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let own = rustix::process::geteuid().as_raw();
    if found.uid() != own {
        anyhow::bail!("the data directory {} belongs to uid {}, not to {own}", dir.display(), found.uid());
    }
    let strange = |name: &std::ffi::OsStr| name != "lost+found";
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let holds_other = entries.filter_map(Result::ok).any(|entry| strange(&entry.file_name()));
    if holds_other && !SIGNS.iter().any(|sign| dir.join(sign).exists()) {
        anyhow::bail!("{} is not empty and no data directory of Corral: choose an empty or new one", dir.display());
    }
    let mode = found.mode() & 0o7777;
    if mode & 0o022 != 0 {
        anyhow::bail!(
            "the data directory {} is writable by others (mode {mode:o}): choose another, or `chmod 700` it if you trust \
             what is in it",
            dir.display()
        );
    }
    if mode & 0o077 != 0 {
        std::fs::set_permissions(dir, Permissions::from_mode(mode & 0o700))
            .with_context(|| format!("cannot close {} to others", dir.display()))?;
    }
    Ok(())
}

fn lock(dir: &Path) -> anyhow::Result<File> {
    let path = dir.join(LOCK);
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    // What a daemon that was just killed had forked holds its lock until it executes.
    const WAIT: Duration = Duration::from_secs(1);
    let begun = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if begun.elapsed() < WAIT => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                anyhow::bail!("the data directory {} is in use by another `corral up`", dir.display())
            }
            Err(error) => return Err(error).with_context(|| format!("cannot lock {}", path.display())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_others_is_refused_and_an_open_one_closed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o7777;
        drop(DataDir::open(&path).unwrap());
        assert_eq!(mode(&path), 0o700);
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        drop(DataDir::open(&path).unwrap());
        assert_eq!(mode(&path), 0o700);
        std::fs::set_permissions(&path, Permissions::from_mode(0o1777)).unwrap();
        let refused = DataDir::open(&path).unwrap_err().to_string();
        assert!(refused.contains("writable by others (mode 1777)"), "{refused}");
        let other = dir.path().join("other");
        std::fs::create_dir_all(other.join("lost+found")).unwrap();
        drop(DataDir::open(&other).unwrap());
        std::fs::remove_file(other.join(LOCK)).unwrap();
        std::fs::write(other.join("precious"), "").unwrap();
        std::fs::set_permissions(&other, Permissions::from_mode(0o755)).unwrap();
        let refused = DataDir::open(&other).unwrap_err().to_string();
        assert!(refused.contains("no data directory of Corral"), "{refused}");
        assert_eq!(mode(&other), 0o755, "it stays as it was");
        // What a backup keeps is a beginning.
        std::fs::write(other.join(CATALOGUE), "").unwrap();
        drop(DataDir::open(&other).unwrap());
        assert_eq!(mode(&other), 0o700);
    }
}
