//! Images, layers, environments, keys and nodes on the command line.

use super::values::{EntrypointArgs, Pair, key_value, layer_kind, milliseconds};
use clap::{Args, Subcommand, ValueEnum};
use corral_api::digest::Digest;
use corral_api::image::LayerKind;
use corral_api::query::UploadKind;
use std::path::PathBuf;

/// How a local image is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KindArg {
    /// Told from its content.
    Auto,
    /// `docker save` archive or OCI layout.
    Archive,
    /// Root file system.
    Rootfs,
}

impl From<KindArg> for UploadKind {
    fn from(kind: KindArg) -> Self {
        match kind {
            KindArg::Auto => Self::Auto,
            KindArg::Archive => Self::Archive,
            KindArg::Rootfs => Self::Rootfs,
        }
    }
}

/// `corral image`.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Import an image.
    Import(ImportArgs),
    /// Build an image from a Dockerfile.
    Build(BuildArgs),
    /// List images.
    Ls,
    /// Print an image's record.
    Inspect {
        /// Name or digest.
        name: String,
    },
    /// Print what differs between two images: A added, C changed, D deleted.
    #[command(after_help = "Example:\n  corral image diff before after")]
    Diff {
        /// The image to compare with.
        from: String,
        /// The image that is compared.
        to: String,
    },
    /// Write an image as an archive that docker, podman and skopeo load: OCI layout and `docker save` in one.
    #[command(after_help = "\
Examples:
  corral image export task -o task.tar
  corral image export task | docker load")]
    Export {
        /// Name or digest.
        name: String,
        /// File to write; standard output where absent or -.
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Remove images.
    Rm {
        /// Names.
        #[arg(required = true)]
        names: Vec<String>,
    },
}

/// `corral image import`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  corral image import docker.io/library/python:3.12-slim --name python
  docker save my-image | corral image import - --name my-image
  corral image import ./oci-layout --name task
  corral image import ./rootfs --name task    a directory with a root file system")]
pub struct ImportArgs {
    /// Registry reference, archive, OCI layout, root file system (tar or directory), or - for standard input.
    pub source: String,
    /// Name in the catalogue; from the source where absent.
    #[arg(long)]
    pub name: Option<String>,
    /// How a local source is laid out.
    #[arg(long)]
    pub kind: Option<KindArg>,
    /// os/architecture[/variant].
    #[arg(long)]
    pub platform: Option<String>,
    /// User for the registry.
    #[arg(long)]
    pub username: Option<String>,
    /// Read the registry's password from standard input.
    #[arg(long, requires = "username")]
    pub password_stdin: bool,
    /// Speak HTTP without TLS to the registry.
    #[arg(long)]
    pub plain_http: bool,
}

/// `corral image build`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  corral image build -t task ./task
  corral image build -t tool --target tools --build-arg VERSION=3 .
  tar c -C ./task . | corral image build -t task -

FROM names images of the catalogue. Steps have no network.")]
pub struct BuildArgs {
    /// Directory, or - for a tar stream on standard input: plain, or with gzip or zstd.
    pub context: String,
    /// Name in the catalogue.
    #[arg(short, long)]
    pub tag: String,
    /// The Dockerfile, in the context; `Dockerfile` where absent.
    #[arg(short, long, value_name = "PATH")]
    pub file: Option<String>,
    /// Build argument.
    #[arg(long = "build-arg", value_name = "K=V", value_parser = key_value)]
    pub build_args: Vec<Pair>,
    /// Stage to build; the last one where absent.
    #[arg(long, value_name = "STAGE")]
    pub target: Option<String>,
    /// Run every step, also where its result is there.
    #[arg(long)]
    pub no_cache: bool,
    /// Memory limit of a step.
    #[arg(long, value_name = "MIB")]
    pub memory_mib: Option<u32>,
    /// CPU limit of a step in cores.
    #[arg(long, value_name = "CORES")]
    pub cpus: Option<f64>,
    /// Limit of a step's processes and threads.
    #[arg(long, value_name = "N")]
    pub pids: Option<u32>,
    /// Disk limit of a step.
    #[arg(long, value_name = "MIB")]
    pub disk_mib: Option<u32>,
}

/// `corral layer`.
#[derive(Debug, Subcommand)]
pub enum LayerCommand {
    /// Build a layer from a directory or tar file.
    #[command(after_help = "Example:\n  corral layer build --kind toolkit --at /opt/tools ./tools")]
    Build {
        /// workspace or toolkit.
        #[arg(long, value_parser = layer_kind)]
        kind: LayerKind,
        /// Where its content goes inside sandboxes.
        #[arg(long, value_name = "PATH")]
        at: String,
        /// Directory, tar file, or - for standard input.
        source: String,
    },
    /// List layers.
    Ls,
    /// What layers take: on the node, of that what can be had again (cached), in the shared store (stored), and of that
    /// what other layers of the node refer to as well (shared).
    Du,
    /// What was read of layers since the server of lazy reads was started: bytes, the fraction of their chunks that was
    /// touched, how often the data was here, and how long a fetch took.
    Stats,
    /// Remove from the shared store what no image, layer, environment or sandbox needs.
    #[command(after_help = "\
Examples:
  corral layer gc --dry-run                   only tell what would go
  corral layer gc --grace 2h")]
    Gc {
        /// How long what nothing needs stays.
        #[arg(long, value_name = "TIME", default_value = "24h", value_parser = milliseconds)]
        grace: u64,
        /// Remove nothing.
        #[arg(long)]
        dry_run: bool,
    },
    /// Remove layers.
    Rm {
        /// Digests.
        #[arg(required = true)]
        digests: Vec<String>,
    },
}

/// `corral env`.
#[derive(Debug, Subcommand)]
pub enum EnvCommand {
    /// Create or replace an environment.
    #[command(after_help = "\
Examples:
  corral env create task-17 --base python --workspace sha256:… -w /work
  corral env create task-17 --file task.json")]
    Create(Box<EnvCreateArgs>),
    /// List environments.
    Ls,
    /// Print an environment's record.
    Inspect {
        /// Name.
        name: String,
    },
    /// Remove environments.
    Rm {
        /// Names.
        #[arg(required = true)]
        names: Vec<String>,
    },
}

/// `corral env create`.
#[derive(Debug, Args)]
pub struct EnvCreateArgs {
    /// Its name.
    pub name: String,
    /// Base image.
    #[arg(long, required_unless_present = "file")]
    pub base: Option<String>,
    /// Workspace layer, lowest first.
    #[arg(long = "workspace", value_name = "DIGEST")]
    pub workspaces: Vec<Digest>,
    /// Toolkit layer, lowest first.
    #[arg(long = "toolkit", value_name = "DIGEST")]
    pub toolkits: Vec<Digest>,
    /// Variable of every command.
    #[arg(short, long = "env", value_name = "K=V", value_parser = key_value)]
    pub env: Vec<Pair>,
    /// Working directory.
    #[arg(short = 'w', long = "cwd", value_name = "DIR")]
    pub cwd: Option<String>,
    /// User, or user:group.
    #[arg(short, long)]
    pub user: Option<String>,
    #[command(flatten)]
    pub startup: EntrypointArgs,
    /// Specification in JSON instead of the options; - for standard input.
    #[arg(short, long, conflicts_with_all = ["base", "workspaces", "toolkits", "env", "cwd", "user", "EntrypointArgs"])]
    pub file: Option<PathBuf>,
}

/// `corral key`.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Create a key and print it once.
    Create {
        /// What it is for.
        name: String,
    },
    /// List keys.
    Ls,
    /// Remove keys.
    Rm {
        /// Key ids.
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

/// `corral node`.
#[derive(Debug, Subcommand)]
pub enum NodeCommand {
    /// List nodes.
    Ls,
}
