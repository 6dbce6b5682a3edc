//! Making an EROFS file of a directory with `mkfs.erofs`, bit-identical for equal content.
//!
//! Fixed: the UUID, the superblock's build time (`-T` would set every file's time, so it is cleared afterwards),
//! extended inodes (the compact ones have no time of their own) and inline attributes only (shared ones are ordered as
//! found). `mkfs.erofs` sorts names itself. Options are those of erofs-utils 1.5 and later.

use crate::config::{CancelFlag, Compression};
use crate::error::ImportError;
use crate::superblock;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const UUID: &str = "00000000-0000-0000-0000-000000000000";
/// A layer takes seconds per GiB; this only ends a program that hangs.
const TIME_LIMIT: Duration = Duration::from_secs(3600);
/// Holes worth storing as such: chunked files keep them at the price of a map.
const WORTHWHILE_HOLES: u64 = 1 << 20;

/// The program and what it can do.
#[derive(Debug, Clone)]
pub(crate) struct Mkfs {
    program: PathBuf,
    chunks: bool,
    lz4: bool,
}

impl Mkfs {
    /// Asks the program for its options.
    ///
    /// # Errors
    /// It cannot be run, or lacks what layers need.
    pub(crate) fn probe(program: &Path) -> Result<Self, ImportError> {
        let unusable = |reason: String| ImportError::MkfsUnusable { program: program.to_owned(), reason };
        let out = Command::new(program).arg("--help").stdin(Stdio::null()).output();
        let out = out.map_err(|e| unusable(format!("cannot be run: {e}")))?;
        let help = [out.stdout, out.stderr].concat();
        let help = String::from_utf8_lossy(&help);
        for needed in ["--preserve-mtime", "-U"] {
            if !help.contains(needed) {
                return Err(unusable(format!("has no option {needed}; erofs-utils 1.5 or later is needed")));
            }
        }
        Ok(Self { program: program.to_owned(), chunks: help.contains("--chunksize"), lz4: help.contains("lz4") })
    }

    /// Builds `target` of the tree at `source`.
    ///
    /// # Errors
    /// The program fails, is missing the compression asked for, or is cancelled.
    pub(crate) fn build(
        &self,
        source: &Path,
        target: &Path,
        compression: Compression,
        hole_bytes: u64,
        cancel: &CancelFlag,
    ) -> Result<(), ImportError> {
        let mut command = Command::new(&self.program);
        command.args(["--quiet", "-d0", "--preserve-mtime", "-Eforce-inode-extended", "-x1000000000", "-U", UUID]);
        if hole_bytes >= WORTHWHILE_HOLES && self.chunks {
            command.arg("--chunksize=4096");
        } else if compression == Compression::Lz4 {
            if !self.lz4 {
                let reason = "was built without lz4".to_owned();
                return Err(ImportError::MkfsUnusable { program: self.program.clone(), reason });
            }
            command.arg("-zlz4");
        }
        command.arg(target).arg(source);
        self.run(command, cancel)?;
        let io = |e| ImportError::io("finish", target, e);
        let file = OpenOptions::new().read(true).write(true).open(target).map_err(io)?;
        superblock::clear_build_time(&file).map_err(io)?;
        pad_to_block(&file).map_err(io)?;
        file.sync_all().map_err(io)
    }

    fn run(&self, mut command: Command, cancel: &CancelFlag) -> Result<(), ImportError> {
        let failed =
            |status: String, stderr: String| ImportError::Mkfs { program: self.program.clone(), status, stderr };
        let mut log = tempfile::tempfile().map_err(|e| ImportError::io("make a log for", &self.program, e))?;
        let log_for =
            || log.try_clone().map(Stdio::from).map_err(|e| ImportError::io("make a log for", &self.program, e));
        command.stdin(Stdio::null()).stdout(log_for()?).stderr(log_for()?);
        let mut child = command.spawn().map_err(|e| failed("not started".to_owned(), e.to_string()))?;
        let started = Instant::now();
        let mut pause = Duration::from_millis(1);
        let status = loop {
            if let Some(status) = child.try_wait().map_err(|e| ImportError::io("wait for", &self.program, e))? {
                break status;
            }
            if cancel.is_cancelled() || started.elapsed() > TIME_LIMIT {
                child.kill().map_err(|e| ImportError::io("stop", &self.program, e))?;
                child.wait().map_err(|e| ImportError::io("wait for", &self.program, e))?;
                return Err(if cancel.is_cancelled() {
                    ImportError::Cancelled
                } else {
                    ImportError::MkfsTimeout { program: self.program.clone(), limit: TIME_LIMIT }
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        };
        if status.success() {
            return Ok(());
        }
        let mut text = String::new();
        if std::io::Seek::rewind(&mut log).is_ok() {
            let mut bytes = Vec::new();
            if log.by_ref().take(64 << 10).read_to_end(&mut bytes).is_ok() {
                text = String::from_utf8_lossy(&bytes)
                    .trim()
                    .chars()
                    .rev()
                    .take(2000)
                    .collect::<Vec<_>>()
                    .iter()
                    .rev()
                    .collect();
            }
        }
        Err(failed(status.to_string(), text))
    }
}

/// File-backed mounts with direct I/O read whole blocks.
fn pad_to_block(file: &File) -> std::io::Result<()> {
    let len = file.metadata()?.len();
    if len % 4096 == 0 { Ok(()) } else { file.set_len(len.next_multiple_of(4096)) }
}
