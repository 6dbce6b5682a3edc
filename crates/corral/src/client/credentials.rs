//! The credentials file: where the gateway is and a key for it. Only its owner may read it.

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// URL of the gateway.
    pub url: String,
    /// API key.
    pub key: String,
}

/// `$XDG_CONFIG_HOME/corral/credentials.json`, usually `~/.config/corral/credentials.json`.
///
/// # Errors
/// There is no home directory.
pub fn default_path() -> anyhow::Result<PathBuf> {
    let config = match std::env::var_os("XDG_CONFIG_HOME").filter(|dir| !dir.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => std::env::home_dir().filter(|dir| dir.is_absolute()).context("HOME is not set")?.join(".config"),
    };
    Ok(config.join("corral/credentials.json"))
}

/// Reads the file; `None` where there is none.
///
/// # Errors
/// It cannot be read, or is damaged.
pub fn read(path: &Path) -> anyhow::Result<Option<Credentials>> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let read = serde_json::from_slice(&text);
    Ok(Some(read.with_context(|| format!("{} is not a credentials file", path.display()))?))
}

/// Writes the file with mode 0600, in one step.
///
/// # Errors
/// It cannot be written.
pub fn write(path: &Path, credentials: &Credentials) -> anyhow::Result<()> {
    let dir = path.parent().context("the credentials file needs a directory")?;
    let write = || -> std::io::Result<()> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let mut file = tempfile::Builder::new().permissions(std::fs::Permissions::from_mode(0o600)).tempfile_in(dir)?;
        serde_json::to_writer_pretty(&mut file, credentials)?;
        file.write_all(b"\n")?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_its_owners_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/credentials.json");
        assert_eq!(read(&path).unwrap(), None);
        let credentials = Credentials { url: "http://127.0.0.1:7070".into(), key: "corral_x".into() };
        for _ in 0..2 {
            write(&path, &credentials).unwrap();
            assert_eq!(read(&path).unwrap().as_ref(), Some(&credentials));
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        std::fs::write(&path, "x").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("credentials.json"));
    }
}
