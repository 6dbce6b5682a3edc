//! `corral image build`: packs the context and follows the build.

use super::pack::{Choice, LeftOut, pack};
use super::transfer::{Pipe, Upload};
use crate::cli::BuildArgs;
use crate::client::{ApiError, Client, Lines, send};
use crate::output::{print_json_line, print_line, tell};
use anyhow::Context as _;
use corral_api::build::{BuildProgress, BuildQuery};
use corral_dockerfile::Ignore;
use std::fs::{self, FileType};
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

/// Builds an image.
pub async fn build(client: &Client, args: &BuildArgs, json: bool) -> anyhow::Result<()> {
    let mut query = BuildQuery { target: args.target.clone(), no_cache: args.no_cache, ..BuildQuery::default() };
    query.build_args = args.build_args.iter().cloned().collect();
    let limits = &mut query.limits;
    limits.memory_mib = args.memory_mib.unwrap_or(limits.memory_mib);
    limits.cpus = args.cpus.unwrap_or(limits.cpus);
    limits.pids = args.pids.unwrap_or(limits.pids);
    limits.disk_mib = args.disk_mib.unwrap_or(limits.disk_mib);
    let upload = if args.context == "-" {
        query.dockerfile = args.file.clone().unwrap_or(query.dockerfile);
        Upload::stdin()
    } else {
        let dir = Path::new(&args.context);
        anyhow::ensure!(dir.is_dir(), "{} is no directory", args.context);
        if let Some(file) = &args.file {
            query.dockerfile = inside(dir, Path::new(file))?;
        }
        let packed = Packed::new(dir, &query.dockerfile)?;
        Upload::written(move |pipe, left_out| packed.write(pipe, left_out))
    };
    let request = client.put(&["v1", "images", &args.tag, "build"]).query(&query.pairs());
    let request = request.header("content-type", "application/x-tar").body(upload.body);
    let built = async { follow(Lines::new(send(request).await?), json).await };
    upload.source.settle(built.await)
}

/// Where a Dockerfile is in the context: named from here, or from there.
fn inside(dir: &Path, file: &Path) -> anyhow::Result<String> {
    let found = if file.is_file() { file.to_owned() } else { dir.join(file) };
    let real = |path: &Path| path.canonicalize().with_context(|| format!("there is no file {}", file.display()));
    let relative = real(&found)?.strip_prefix(real(dir)?).map(Path::to_owned);
    let relative = relative.with_context(|| format!("{} is not in the context {}", file.display(), dir.display()))?;
    relative.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", file.display()))
}

/// A context as it is sent: what `.dockerignore` leaves out stays here.
struct Packed {
    dir: PathBuf,
    dockerfile: String,
    ignore: Ignore,
}

impl Packed {
    fn new(dir: &Path, dockerfile: &str) -> anyhow::Result<Self> {
        let own = dir.join(format!("{dockerfile}.dockerignore"));
        let file = if own.is_file() { own } else { dir.join(".dockerignore") };
        let text = match fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", file.display())),
        };
        Ok(Self { dir: dir.to_owned(), dockerfile: dockerfile.to_owned(), ignore: Ignore::new(&text)? })
    }

    /// The server needs these whatever the rules say, and heeds the rules itself.
    fn is_needed(&self, path: &[u8]) -> bool {
        let own = || format!("{}.dockerignore", self.dockerfile);
        path == self.dockerfile.as_bytes() || path == b".dockerignore" || path == own().as_bytes()
    }

    fn choose(&self, path: &[u8], kind: FileType) -> Choice {
        let excluded = self.ignore.excludes(path) && !self.is_needed(path);
        let needed = || self.dockerfile.as_bytes().strip_prefix(path).is_some_and(|rest| rest.starts_with(b"/"));
        // Pipes and devices are nothing to build from; sockets are none either, which is said where they are met.
        let known = kind.is_dir() || kind.is_file() || kind.is_symlink() || kind.is_socket();
        Choice {
            send: !excluded && known && !path.is_empty(),
            descend: !excluded || self.ignore.takes_back() || needed(),
        }
    }

    fn write(&self, pipe: &mut Pipe, left_out: &mut LeftOut) -> anyhow::Result<()> {
        pack(&self.dir, pipe, |path, kind| self.choose(path, kind), |socket| left_out.add(socket))
    }
}

/// Shows steps and what they write on standard error; the image on standard output at the end.
async fn follow(mut lines: Lines, json: bool) -> anyhow::Result<()> {
    while let Some(line) = lines.next().await? {
        if line.is_empty() {
            continue;
        }
        let progress: BuildProgress = serde_json::from_slice(&line).context("the server's answer cannot be read")?;
        if json {
            print_json_line(&progress)?;
        }
        match progress {
            BuildProgress::Imported { image } => {
                return if json { Ok(()) } else { print_line(&format!("{} {}", image.name, image.digest)) };
            }
            BuildProgress::Failed { problem, .. } => return Err(ApiError::of(problem).into()),
            _ if json => {}
            BuildProgress::Step { number, total, text, cached, .. } => {
                tell(format_args!("[{number}/{total}] {}{text}\n", if cached { "cached " } else { "" }));
            }
            BuildProgress::Output { text, .. } => tell(format_args!("{text}")),
            BuildProgress::Note { text } => tell(format_args!("note: {text}\n")),
        }
    }
    anyhow::bail!("the build broke off before the end")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt as _;

    #[test]
    fn the_context_is_packed_without_what_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in [
            ("docker/Dockerfile", "FROM bb"),
            (".dockerignore", "docker\nnode_modules\n*.log\n!keep.log\n.dockerignore"),
            ("node_modules/deep/x", ""),
            ("a.log", ""),
            ("keep.log", ""),
            ("src/main", ""),
        ] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link")).unwrap();
        for name in [&b"src/caf\xe9"[..], b"\xff.log"] {
            fs::write(dir.path().join(std::ffi::OsStr::from_bytes(name)), "").unwrap();
        }
        let file = dir.path().join("docker/Dockerfile");
        assert_eq!(inside(dir.path(), &file).unwrap(), "docker/Dockerfile");
        assert_eq!(inside(dir.path(), Path::new("docker/Dockerfile")).unwrap(), "docker/Dockerfile");
        assert!(inside(&dir.path().join("src"), &file).is_err());
        let packed = Packed::new(dir.path(), "docker/Dockerfile").unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let bytes = runtime.block_on(async {
            use futures_util::TryStreamExt as _;
            let upload = Upload::written(move |pipe, left_out| packed.write(pipe, left_out));
            let stream = http_body_util::BodyExt::into_data_stream(upload.body);
            stream
                .try_fold(Vec::new(), |mut all, piece| async move {
                    all.extend_from_slice(&piece);
                    Ok(all)
                })
                .await
                .unwrap()
        });
        let mut names: Vec<String> = tar::Archive::new(bytes.as_slice())
            .entries()
            .unwrap()
            .map(|e| e.unwrap().path_bytes().escape_ascii().to_string().trim_end_matches('/').to_owned())
            .collect();
        names.sort();
        assert_eq!(
            names,
            [".dockerignore", "docker/Dockerfile", "keep.log", "link", "src", "src/caf\\xe9", "src/main"]
        );
    }
}
