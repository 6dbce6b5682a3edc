//! `corral cp`: files and directories between this machine and a sandbox.

use super::pack::LeftOut;
use super::transfer::{self, Upload};
use crate::cli::CpArgs;
use crate::client::{ApiError, Client, fetch, send};
use anyhow::Context as _;
use corral_api::files::{FileStatus, FileType, MkdirRequest};
use corral_api::ids::SandboxId;
use corral_api::query::{FileQuery, FileWrite};
use futures_util::TryStreamExt as _;
use reqwest::Response;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use tokio_util::io::{StreamReader, SyncIoBridge};

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Side {
    Inside { id: String, path: String },
    Local(PathBuf),
    Stream,
}

fn side(text: &str) -> Side {
    match text.split_once(':') {
        _ if text == "-" => Side::Stream,
        Some((id, path)) if id.parse::<SandboxId>().is_ok() && path.starts_with('/') => {
            Side::Inside { id: id.into(), path: path.into() }
        }
        _ => Side::Local(text.into()),
    }
}

/// `corral cp`.
pub async fn run(client: &Client, args: &CpArgs) -> anyhow::Result<()> {
    let copy = |id| Copy { client, id, user: args.user.clone() };
    match (side(&args.source), side(&args.target)) {
        (Side::Local(from), Side::Inside { id, path }) => copy(id).upload(&from, path).await,
        (Side::Stream, Side::Inside { id, path }) => copy(id).write(Upload::stdin(), path, None).await,
        (Side::Inside { id, path }, Side::Local(to)) => copy(id).download(&path, to).await,
        (Side::Inside { id, path }, Side::Stream) => copy(id).print(&path).await,
        _ => anyhow::bail!("one side must be ID:/path with an absolute path, the other a local path or -"),
    }
}

struct Copy<'a> {
    client: &'a Client,
    id: String,
    user: Option<String>,
}

fn last_name(path: &Path) -> Option<String> {
    path.file_name().map(|name| name.to_string_lossy().into_owned())
}

impl Copy<'_> {
    fn path<'p>(&'p self, rest: &[&'p str]) -> Vec<&'p str> {
        ["v1", "sandboxes", &self.id, "files"].iter().chain(rest).copied().collect()
    }

    fn query(&self, path: &str) -> FileQuery {
        FileQuery { path: path.into(), user: self.user.clone() }
    }

    async fn stat(&self, path: &str) -> anyhow::Result<Option<FileStatus>> {
        match fetch(self.client.get(&self.path(&["stat"])).query(&self.query(path))).await {
            Ok(status) => Ok(Some(status)),
            Err(error) if error.downcast_ref::<ApiError>().is_some_and(|e| e.status == 404) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The target, or the source's name below it where it is a directory.
    async fn target_inside(&self, from: &Path, to: String) -> anyhow::Result<String> {
        let directory = self.stat(&to).await?.is_some_and(|status| status.file_type == FileType::Directory);
        let absolute = std::path::absolute(from).unwrap_or_else(|_| from.to_owned());
        match last_name(&absolute) {
            Some(name) if directory || to.ends_with('/') => Ok(format!("{}/{name}", to.trim_end_matches('/'))),
            _ => Ok(to),
        }
    }

    async fn upload(&self, from: &Path, to: String) -> anyhow::Result<()> {
        let kind = tokio::fs::metadata(from).await.with_context(|| format!("cannot read {}", from.display()))?;
        let to = self.target_inside(from, to).await?;
        if !kind.is_dir() {
            let mode = kind.permissions().mode() & 0o7777;
            return self.write(Upload::file(from).await?, to, Some(mode)).await;
        }
        let make = MkdirRequest { path: to.clone(), parents: true, mode: None, user: self.user.clone() };
        send(self.client.post(&self.path(&["mkdir"])).json(&make)).await?;
        let request = self.client.put(&self.path(&["tar"])).query(&self.query(&to));
        let upload = Upload::directory(from.to_owned());
        let request = request.header("content-type", "application/x-tar").body(upload.body);
        upload.source.settle(send(request).await.map(drop))
    }

    async fn write(&self, upload: Upload, path: String, mode: Option<u32>) -> anyhow::Result<()> {
        let query = FileWrite { path, user: self.user.clone(), mode, parents: true };
        let mut request = self.client.put(&self.path(&[])).query(&query);
        if let Some(length) = upload.length {
            request = request.header("content-length", length);
        }
        let request = request.header("content-type", "application/octet-stream");
        upload.source.settle(send(request.body(upload.body)).await.map(drop))
    }

    async fn read(&self, rest: &[&str], path: &str) -> anyhow::Result<Response> {
        send(self.client.get(&self.path(rest)).query(&self.query(path))).await
    }

    async fn print(&self, path: &str) -> anyhow::Result<()> {
        transfer::print(self.read(&[], path).await?).await
    }

    async fn download(&self, path: &str, to: PathBuf) -> anyhow::Result<()> {
        let status = self.stat(path).await?.with_context(|| format!("there is no {path} in the sandbox"))?;
        let to = match last_name(Path::new(path)) {
            Some(name) if to.is_dir() => to.join(name),
            _ => to,
        };
        if status.file_type == FileType::Directory {
            return self.download_directory(path, to).await;
        }
        transfer::save(self.read(&[], path).await?, &to, Some(status.mode & 0o777)).await
    }

    /// Unpacks below `to`. The archive comes from the sandbox: paths and links that lead out of `to` are not followed,
    /// ownership and set-id bits are not taken over.
    async fn download_directory(&self, path: &str, to: PathBuf) -> anyhow::Result<()> {
        let response = self.read(&["tar"], path).await?;
        let stream = Box::pin(response.bytes_stream().map_err(std::io::Error::other));
        let reader = SyncIoBridge::new(StreamReader::new(stream));
        let unpack = move || -> anyhow::Result<LeftOut> {
            let wrote = || format!("cannot unpack into {}", to.display());
            std::fs::create_dir_all(&to).with_context(wrote)?;
            let mut archive = tar::Archive::new(reader);
            archive.set_preserve_ownerships(false);
            archive.set_preserve_permissions(false);
            archive.set_unpack_xattrs(false);
            let (mut left_out, mut directories) = (LeftOut::special(), Vec::new());
            for entry in archive.entries().with_context(wrote)? {
                let mut entry = entry.with_context(wrote)?;
                match entry.header().entry_type() {
                    tar::EntryType::Fifo | tar::EntryType::Char | tar::EntryType::Block => {
                        left_out.add(&entry.path().with_context(wrote)?);
                    }
                    // Last, since their modes may forbid what comes into them.
                    tar::EntryType::Directory => directories.push(entry),
                    _ => {
                        entry.unpack_in(&to).with_context(wrote)?;
                    }
                }
            }
            for mut directory in directories.into_iter().rev() {
                directory.unpack_in(&to).with_context(wrote)?;
            }
            Ok(left_out)
        };
        tokio::task::spawn_blocking(unpack).await.context("unpacking failed")??.tell();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_told_apart() {
        let inside = Side::Inside { id: "sabcd0123456789".into(), path: "/a:b".into() };
        assert_eq!(side("sabcd0123456789:/a:b"), inside);
        assert_eq!(side("-"), Side::Stream);
        for local in ["sabcd0123456789:relative", "C:/x", "./sabcd0123456789:/x", "a", "/a"] {
            assert_eq!(side(local), Side::Local(local.into()), "{local}");
        }
    }
}
