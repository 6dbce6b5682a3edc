//! How fast files are read whose bytes are on this machine but not in the page cache of their mount.

use anyhow::{Context, Result, ensure};
use rustix::fs::Advice;
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

/// What is asked for at once in a pass from front to back.
const SEQUENTIAL: usize = 1 << 20;
/// What is asked for at once anywhere.
const RANDOM: usize = 16 << 10;

/// Reads regular files of a directory, those named or all: each from front to back, or so many pieces anywhere.
///
/// # Errors
/// No files, or one cannot be read.
pub fn read(directory: &Path, names: &[String], random: Option<u64>) -> Result<Value> {
    let mut files = Vec::new();
    let mut paths: Vec<_> = names.iter().map(|name| directory.join(name)).collect();
    if paths.is_empty() {
        paths = std::fs::read_dir(directory)?.map(|e| Ok(e?.path())).collect::<Result<_>>()?;
    }
    paths.sort();
    for path in paths {
        let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
        let meta = file.metadata()?;
        if meta.is_file() {
            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
            files.push((file, meta.len()));
        }
    }
    ensure!(!files.is_empty(), "{} has no files", directory.display());
    let begun = Instant::now();
    let bytes = match random {
        None => all(&files)?,
        Some(count) => pieces(&files, count)?,
    };
    let seconds = begun.elapsed().as_secs_f64();
    Ok(json!({"bytes": bytes, "seconds": seconds, "per_second": bytes as f64 / seconds}))
}

fn all(files: &[(File, u64)]) -> Result<u64> {
    let mut buffer = vec![0; SEQUENTIAL];
    let mut bytes = 0;
    for (file, size) in files {
        let mut at = 0;
        while at < *size {
            let read = file.read_at(&mut buffer, at)?;
            ensure!(read > 0, "a file is shorter than it was");
            at += read as u64;
        }
        bytes += at;
    }
    Ok(bytes)
}

fn pieces(files: &[(File, u64)], count: u64) -> Result<u64> {
    let mut buffer = vec![0; RANDOM];
    let mut bytes = 0;
    // The same places in every run: a generator of Knuth's with a fixed seed.
    let mut state = 1_u64;
    let mut next = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below.max(1)
    };
    for _ in 0..count {
        let (file, size) = &files[next(files.len() as u64) as usize];
        let at = next(size / RANDOM as u64) * RANDOM as u64;
        bytes += file.read_at(&mut buffer, at)? as u64;
    }
    Ok(bytes)
}
