//! Images and layers: import, build, list, remove.

use super::transfer::{self, Upload};
use super::{build, delete_each};
use crate::cli::{ImageCommand, ImportArgs, KindArg, LayerCommand};
use crate::client::{ApiError, Client, Lines, fetch, fetch_pages, send};
use crate::output::{bytes, print_json, print_json_line, print_line, print_table, printable, share, tell};
use anyhow::Context as _;
use corral_api::catalogue::{GcResult, GcSpec, ImageList, LayerList, LayerUsageList};
use corral_api::image::{Change, ImageDiff, ImageRecord, ImportProgress};
use corral_api::node::RegistryImport;
use corral_api::query::{ImageUpload, LayerUpload, UploadKind};
use indicatif::{ProgressBar, ProgressStyle};
use reqwest::RequestBuilder;
use std::collections::HashMap;
use std::io::{IsTerminal as _, Read as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// How names of archives end.
const ARCHIVES: [&str; 4] = [".tar", ".tar.gz", ".tgz", ".tar.zst"];

/// `corral image`.
pub async fn image(client: &Client, command: &ImageCommand, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        ImageCommand::Import(args) => import(client, args, json).await?,
        ImageCommand::Build(args) => build::build(client, args, json).await?,
        ImageCommand::Ls => {
            let split = |page: ImageList| (page.images, page.next_cursor);
            let images = fetch_pages(|| client.get(&["v1", "images"]), split).await?;
            let list = ImageList { images, next_cursor: None };
            if json {
                print_json(&list)?;
            } else {
                print_table(
                    &["NAME", "DIGEST", "PLATFORM", "LAYERS", "SIZE"],
                    list.images.iter().map(|i| {
                        let short = i.digest.to_string().chars().take(19).collect();
                        vec![i.name.clone(), short, i.platform.clone(), i.layers.len().to_string(), bytes(i.size_bytes)]
                    }),
                )?;
            }
        }
        ImageCommand::Inspect { name } => {
            print_json(&fetch::<ImageRecord>(client.get(&["v1", "images", name])).await?)?;
        }
        ImageCommand::Export { name, output } => export(client, name, output.as_deref()).await?,
        ImageCommand::Diff { from, to } => diff(client, from, to, json).await?,
        ImageCommand::Rm { names } => return delete_each(client, "images", names, json).await,
    }
    Ok(ExitCode::SUCCESS)
}

async fn export(client: &Client, name: &str, output: Option<&Path>) -> anyhow::Result<()> {
    let to = output.filter(|path| *path != Path::new("-"));
    if to.is_none() && std::io::stdout().is_terminal() {
        anyhow::bail!("standard output is a terminal, and an archive is no text: name a file with -o");
    }
    let response = send(client.get(&["v1", "images", name, "archive"])).await?;
    match to {
        Some(path) => transfer::save(response, path, None).await,
        None => transfer::print(response).await,
    }
}

async fn diff(client: &Client, from: &str, to: &str, json: bool) -> anyhow::Result<()> {
    let diff: ImageDiff = fetch(client.get(&["v1", "images", to, "diff"]).query(&[("from", from)])).await?;
    if json {
        return print_json(&diff);
    }
    for entry in &diff.entries {
        let mark = match entry.change {
            Change::Added => 'A',
            Change::Changed => 'C',
            Change::Deleted => 'D',
        };
        print_line(&format!("{mark} {}", printable(&entry.path)))?;
    }
    if diff.truncated { print_line("… and more") } else { Ok(()) }
}

/// `corral layer`.
pub async fn layer(client: &Client, command: &LayerCommand, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        LayerCommand::Build { kind, at, source } => {
            let query = LayerUpload { kind: *kind, at: at.clone() };
            let request = client.put(&["v1", "layers"]).query(&query).header("content-type", "application/x-tar");
            upload(request, source, json).await?;
        }
        LayerCommand::Ls => {
            let split = |page: LayerList| (page.layers, page.next_cursor);
            let layers = fetch_pages(|| client.get(&["v1", "layers"]), split).await?;
            let list = LayerList { layers, next_cursor: None };
            if json {
                print_json(&list)?;
            } else {
                print_table(
                    &["DIGEST", "KIND", "AT", "ENTRIES", "SIZE"],
                    list.layers.iter().map(|l| {
                        let kind = format!("{:?}", l.kind).to_lowercase();
                        vec![l.digest.to_string(), kind, l.at.clone(), l.entries.to_string(), bytes(l.size_bytes)]
                    }),
                )?;
            }
        }
        LayerCommand::Du => usage(client, json).await?,
        LayerCommand::Stats => reads(client, json).await?,
        LayerCommand::Gc { grace, dry_run } => {
            let spec = GcSpec { grace_ms: *grace, dry_run: *dry_run };
            let result: GcResult = fetch(client.post(&["v1", "layers:gc"]).json(&spec)).await?;
            if json {
                print_json(&result)?;
            } else {
                let (layers, packs, size) = (result.layers.len(), result.packs, bytes(result.pack_bytes));
                let would = if result.dry_run { "would be " } else { "" };
                let (waiting, kept) = (result.waiting, bytes(result.kept_bytes));
                print_line(&format!(
                    "{layers} layers and {packs} packs ({size}) {would}removed; {waiting} unneeded wait, {kept} are needed"
                ))?;
                let (local, size) = (result.local.len(), bytes(result.local_bytes));
                print_line(&format!("on the node, {local} layers ({size}) {would}removed"))?;
                if result.unfinished > 0 {
                    print_line(&format!("{} uploads that were cut off are removed", result.unfinished))?;
                }
            }
        }
        LayerCommand::Rm { digests } => return delete_each(client, "layers", digests, json).await,
    }
    Ok(ExitCode::SUCCESS)
}

async fn usage(client: &Client, json: bool) -> anyhow::Result<()> {
    let list: LayerUsageList = fetch(client.get(&["v1", "layers:usage"])).await?;
    if json {
        return print_json(&list);
    }
    print_table(
        &["DIGEST", "SIZE", "HERE", "CHUNKS", "CACHED", "STORED", "SHARED", "MOUNTED", "PUBLISHED"],
        list.layers.iter().map(|l| {
            let yes = |set: bool| if set { "yes" } else { "no" }.to_owned();
            let some = |size: Option<u64>| size.map_or_else(String::new, bytes);
            vec![
                l.digest.to_string(),
                bytes(l.size_bytes),
                bytes(l.local_bytes),
                format!("{}/{}", l.local_chunks, l.chunks),
                bytes(l.cached_bytes),
                some(l.stored_bytes),
                some(l.shared_bytes),
                yes(l.mounted),
                l.published.map_or_else(String::new, yes),
            ]
        }),
    )?;
    if let Some(limit) = list.cache_limit_bytes {
        print_line(&format!("{} of {} cached", bytes(list.cached_bytes), bytes(limit)))?;
    }
    if list.elsewhere > 0 { print_line(&format!("{} more in the shared store", list.elsewhere)) } else { Ok(()) }
}

async fn reads(client: &Client, json: bool) -> anyhow::Result<()> {
    let list: LayerUsageList = fetch(client.get(&["v1", "layers:usage"])).await?;
    let read = list.layers.iter().filter_map(|layer| Some((layer, layer.reads.as_ref()?)));
    if json {
        let read: Vec<_> = read
            .map(|(layer, reads)| serde_json::json!({ "digest": layer.digest, "chunks": layer.chunks, "reads": reads }))
            .collect();
        return print_json(&read);
    }
    print_table(
        &["DIGEST", "READ", "FETCHED", "TOUCHED", "HITS", "MISSES", "HIT RATE", "ERRORS", "FETCH"],
        read.map(|(layer, reads)| {
            let fetch_ms = reads.fetch_us as f64 / 1000.0 / reads.fetches.max(1) as f64;
            vec![
                layer.digest.to_string(),
                bytes(reads.read_bytes),
                bytes(reads.fetched_bytes),
                share(reads.touched_chunks, layer.chunks),
                reads.hits.to_string(),
                reads.misses.to_string(),
                share(reads.hits, reads.hits + reads.misses),
                reads.errors.to_string(),
                format!("{fetch_ms:.1} ms"),
            ]
        }),
    )
}

async fn import(client: &Client, args: &ImportArgs, json: bool) -> anyhow::Result<()> {
    let path = Path::new(&args.source);
    let local = args.source == "-" || path.exists();
    if !local && names_a_file(&args.source) {
        anyhow::bail!("there is no file {}", args.source);
    }
    if local {
        anyhow::ensure!(args.username.is_none(), "--username is for registries; {} is a file", args.source);
        let name = args.name.clone().or_else(|| usual_name(path));
        let name = name.context("--name is needed for this source")?;
        let query = ImageUpload { kind: layout(path, args.kind), platform: args.platform.clone() };
        let request = client.put(&["v1", "images", &name]).query(&query);
        upload(request.header("content-type", "application/x-tar"), &args.source, json).await
    } else {
        anyhow::ensure!(args.kind.is_none(), "--kind is for local sources, and there is no file {}", args.source);
        let body = RegistryImport {
            reference: args.source.clone(),
            name: args.name.clone(),
            username: args.username.clone(),
            password: if args.password_stdin { Some(read_password()?) } else { None },
            platform: args.platform.clone(),
            plain_http: args.plain_http,
        };
        follow(Lines::new(send(client.post(&["v1", "images:import"]).json(&body)).await?), json).await
    }
}

/// Sends the bytes of a source and follows what becomes of them.
async fn upload(request: RequestBuilder, source: &str, json: bool) -> anyhow::Result<()> {
    let Upload { body, source, .. } = Upload::of(source).await?;
    let followed = async { follow(Lines::new(send(request.body(body)).await?), json).await };
    source.settle(followed.await)
}

/// Whether a source cannot be meant as a reference of a registry: those of registries have a tag or no such ending.
fn names_a_file(source: &str) -> bool {
    source.starts_with(['.', '/']) || ARCHIVES.iter().any(|end| source.ends_with(end))
}

fn read_password() -> anyhow::Result<String> {
    let mut text = String::new();
    std::io::stdin().take(64 << 10).read_to_string(&mut text).context("cannot read the password")?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// The file's name without what says that it is an archive.
fn usual_name(path: &Path) -> Option<String> {
    let path = std::path::absolute(path).ok()?;
    let name = path.file_name()?.to_str()?;
    let bare = ARCHIVES.iter().find_map(|end| name.strip_suffix(end));
    Some(bare.unwrap_or(name).to_lowercase()).filter(|name| !name.is_empty() && name != "-")
}

fn layout(path: &Path, given: Option<KindArg>) -> UploadKind {
    match given {
        Some(kind) => kind.into(),
        None if path.join("oci-layout").is_file() => UploadKind::Archive,
        None if path.is_dir() => UploadKind::Rootfs,
        None => UploadKind::Auto,
    }
}

/// Shows progress until the last line. Bars on a terminal, plain lines elsewhere, the lines themselves with `--json`.
async fn follow(mut lines: Lines, json: bool) -> anyhow::Result<()> {
    let mut show = Show::new(json);
    while let Some(line) = lines.next().await? {
        if line.is_empty() {
            continue;
        }
        let progress: ImportProgress = serde_json::from_slice(&line).context("the server's answer cannot be read")?;
        if json {
            print_json_line(&progress)?;
        }
        match progress {
            ImportProgress::Imported { image } => {
                show.end();
                return if json { Ok(()) } else { print_line(&format!("{} {}", image.name, image.digest)) };
            }
            ImportProgress::Built { layer } => {
                show.end();
                return if json { Ok(()) } else { print_line(&layer.digest.to_string()) };
            }
            ImportProgress::Failed { problem } => {
                show.end();
                return Err(ApiError::of(problem).into());
            }
            other => show.step(&other),
        }
    }
    anyhow::bail!("the progress broke off before the end")
}

struct Show {
    bar: Option<ProgressBar>,
    plain: bool,
    fetched: HashMap<u32, u64>,
    layers: u32,
}

impl Show {
    fn new(json: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = (terminal && !json).then(|| {
            let bar = ProgressBar::new_spinner().with_message("reading");
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        Self { bar, plain: !terminal && !json, fetched: HashMap::new(), layers: 0 }
    }

    fn step(&mut self, progress: &ImportProgress) {
        let text = match progress {
            ImportProgress::Planned { layers, bytes: total } => {
                self.layers = *layers;
                if let Some(bar) = self.bar.as_ref().filter(|_| *total > 0) {
                    bar.set_length(*total);
                    let style = "{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {msg}";
                    if let Ok(style) = ProgressStyle::with_template(style) {
                        bar.set_style(style);
                    }
                }
                format!("{layers} layers, {}", bytes(*total))
            }
            ImportProgress::Fetched { layer, bytes } => {
                self.fetched.insert(*layer, *bytes);
                if let Some(bar) = &self.bar {
                    bar.set_position(self.fetched.values().sum());
                }
                return;
            }
            ImportProgress::Building { layer } => {
                format!("building layer {}/{}", layer + 1, self.layers.max(layer + 1))
            }
            ImportProgress::Stored { digest, bytes: size } => format!("stored {digest} ({})", bytes(*size)),
            ImportProgress::Imported { .. } | ImportProgress::Built { .. } | ImportProgress::Failed { .. } => return,
        };
        match &self.bar {
            Some(bar) => bar.set_message(text),
            None if self.plain => tell(format_args!("{text}\n")),
            None => {}
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_layouts_come_from_the_source() {
        assert_eq!(usual_name(Path::new("/x/My-Image.tar.gz")).as_deref(), Some("my-image"));
        assert_eq!(usual_name(Path::new("-")), None);
        assert_eq!(usual_name(Path::new("/")), None);
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(layout(dir.path(), None), UploadKind::Rootfs);
        std::fs::write(dir.path().join("oci-layout"), "{}").unwrap();
        assert_eq!(layout(dir.path(), None), UploadKind::Archive);
        assert_eq!(layout(dir.path(), Some(KindArg::Rootfs)), UploadKind::Rootfs);
        assert_eq!(layout(Path::new("x.tar"), None), UploadKind::Auto);
    }
}
