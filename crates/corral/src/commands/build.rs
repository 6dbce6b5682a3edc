//! `corral image build`: packs the context and follows the build.

use super::transfer::{Pipe, Upload};
use crate::cli::BuildArgs;
use crate::client::{ApiError, Client, Lines, send};
use crate::output::{print_json_line, print_line, tell};
use anyhow::Context as _;
use corral_api::build::{BuildProgress, BuildQuery};
use corral_dockerfile::Ignore;
use std::fs;
use std::io;
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
        Upload::written(move |pipe| packed.write(pipe))
    };
    let request = client.put(&["v1", "images", &args.tag, "build"]).query(&query.pairs());
    let response = send(request.header("content-type", "application/x-tar").body(upload.body)).await?;
    follow(Lines::new(response), json).await
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
    fn is_needed(&self, path: &str) -> bool {
        path == self.dockerfile || path == ".dockerignore" || path == format!("{}.dockerignore", self.dockerfile)
    }

    fn write(&self, pipe: &mut Pipe) -> io::Result<()> {
        let mut tar = tar::Builder::new(pipe);
        tar.follow_symlinks(false);
        let mut stack = self.below("")?;
        while let Some(path) = stack.pop() {
            let real = self.dir.join(&path);
            let kind = fs::symlink_metadata(&real)?.file_type();
            let excluded = self.ignore.excludes(&path) && !self.is_needed(&path);
            if kind.is_dir() {
                let needed = self.dockerfile.starts_with(&format!("{path}/"));
                if !excluded || self.ignore.takes_back() || needed {
                    stack.extend(self.below(&path)?);
                }
            }
            // Sockets and pipes are nothing to build from.
            if !excluded && (kind.is_dir() || kind.is_file() || kind.is_symlink()) {
                tar.append_path_with_name(&real, &path)?;
            }
        }
        tar.finish()
    }

    /// What lies in a directory, the last one first.
    fn below(&self, path: &str) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.dir.join(path))? {
            let name = entry?.file_name();
            let text = name.to_str().ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, format!("{path}/{}: not UTF-8", name.display()))
            })?;
            names.push(if path.is_empty() { text.to_owned() } else { format!("{path}/{text}") });
        }
        names.sort_unstable_by(|a, b| b.cmp(a));
        Ok(names)
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
        let file = dir.path().join("docker/Dockerfile");
        assert_eq!(inside(dir.path(), &file).unwrap(), "docker/Dockerfile");
        assert_eq!(inside(dir.path(), Path::new("docker/Dockerfile")).unwrap(), "docker/Dockerfile");
        assert!(inside(&dir.path().join("src"), &file).is_err());
        let packed = Packed::new(dir.path(), "docker/Dockerfile").unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let bytes = runtime.block_on(async {
            use futures_util::TryStreamExt as _;
            let upload = Upload::written(move |pipe| packed.write(pipe));
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
            .map(|e| e.unwrap().path().unwrap().to_string_lossy().trim_end_matches('/').to_owned())
            .collect();
        names.sort();
        assert_eq!(names, [".dockerignore", "docker/Dockerfile", "keep.log", "link", "src", "src/main"]);
    }
}
