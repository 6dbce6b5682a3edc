//! The data directory: made where missing, used by one process at a time.

use crate::cli::UpArgs;
use anyhow::Context as _;
use rustix::fs::{FlockOperation, flock};
use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

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
    /// It cannot be made, or another process uses it.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let path = std::path::absolute(path).context("the data directory has no absolute path")?;
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&path);
        made.with_context(|| format!("cannot make the data directory {}", path.display()))?;
        Ok(Self { _lock: lock(&path)?, path, _temporary: None })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn lock(dir: &Path) -> anyhow::Result<File> {
    let path = dir.join("lock");
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            anyhow::bail!("the data directory {} is in use by another `corral up`", dir.display())
        }
        Err(error) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
    }
}
