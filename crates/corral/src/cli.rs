//! The command line: what can be said, with its help.

mod records;
mod values;

pub use records::{
    BuildArgs, EnvCommand, EnvCreateArgs, ImageCommand, ImportArgs, KeyCommand, KindArg, LayerCommand, NodeCommand,
};
pub use values::{EntrypointArgs, Pair, key_value, milliseconds};

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use corral_api::command::StreamName;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Agent sandboxes for RL training and evaluation.
#[derive(Debug, Parser)]
#[command(
    name = "corral",
    version,
    max_term_width = 110,
    after_help = "\
Examples:
  corral up                                   start everything on this machine
  corral image import docker.io/library/python:3.12-slim --name python
  corral run python -- python -c 'print(1)'   run one command in a fresh sandbox
  id=$(corral create python)                  keep a sandbox
  corral exec $id -- ls -l /
  corral sh $id
  corral rm $id"
)]
pub struct Cli {
    /// Machine-readable output, also of errors.
    #[arg(long, global = true)]
    pub json: bool,
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(subcommand)]
    pub command: Command,
}

/// Which gateway to speak to.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// URL of the gateway; from the credentials file where absent.
    #[arg(long, global = true, env = "CORRAL_API_URL", hide_env_values = true)]
    pub api_url: Option<String>,
    /// API key; from the credentials file where absent.
    #[arg(long, global = true, env = "CORRAL_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Credentials file [default: ~/.config/corral/credentials.json].
    #[arg(long, global = true, env = "CORRAL_CREDENTIALS", value_name = "FILE")]
    pub credentials: Option<PathBuf>,
    /// PEM certificate of a private issuer to trust.
    #[arg(long, global = true, env = "CORRAL_CA_CERT", value_name = "FILE")]
    pub ca_cert: Option<PathBuf>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start the node and the gateway on this machine.
    Up(UpArgs),
    /// End what a `corral up` that has ended left running, and give the host back what it took.
    Down(DownArgs),
    /// Try what this machine can do, feature by feature.
    Doctor(DoctorArgs),
    /// Run one command in a fresh sandbox, then remove it.
    Run(RunArgs),
    /// Create a sandbox and print its id.
    Create(CreateArgs),
    /// Run a command in a sandbox.
    Exec(ExecArgs),
    /// Open a terminal in a sandbox.
    Sh(ShArgs),
    /// Copy files into or out of a sandbox.
    Cp(CpArgs),
    /// List sandboxes.
    Ls(LsArgs),
    /// List the commands of a sandbox.
    Ps {
        /// Sandbox id.
        id: String,
    },
    /// Print the output of a command.
    Logs(LogsArgs),
    /// Remove sandboxes.
    Rm {
        /// Sandbox ids.
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Freeze sandboxes.
    Pause {
        /// Sandbox ids.
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Let frozen sandboxes go on.
    Resume {
        /// Sandbox ids.
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Pack what a sandbox wrote into an image that new sandboxes start from.
    #[command(after_help = "\
Examples:
  corral snapshot $id solved-17               name the image
  corral snapshot $id clean --scrub '/root/.cache' --scrub '/**/__pycache__'
  corral create clean")]
    Snapshot {
        /// Sandbox id.
        id: String,
        /// Name of the image.
        name: String,
        /// Leave this path out, with all below it; * and ? match within a name, ** any number of names.
        #[arg(long, value_name = "PATTERN")]
        scrub: Vec<String>,
    },
    /// Keep the disk of a sandbox as it is now, and print the checkpoint's number.
    Checkpoint {
        /// Sandbox id.
        id: String,
    },
    /// Put the disk of a sandbox back to a checkpoint; all its processes end.
    #[command(after_help = "\
Examples:
  n=$(corral checkpoint $id)
  corral exec $id -- rm -rf /work
  corral rollback $id $n")]
    Rollback {
        /// Sandbox id.
        id: String,
        /// Number of the checkpoint.
        checkpoint: u32,
    },
    /// Make new sandboxes whose disks begin as this one's is now, and print their ids.
    #[command(after_help = "\
Examples:
  corral fork $id                             one more
  corral fork $id -n 8                        eight attempts from here")]
    Fork {
        /// Sandbox id.
        id: String,
        /// How many.
        #[arg(short = 'n', long, default_value = "1", value_parser = clap::value_parser!(u32).range(1..=256))]
        count: u32,
    },
    /// Print what happened to sandboxes.
    Events(EventsArgs),
    /// Resources a sandbox uses.
    Stats {
        /// Sandbox id.
        id: String,
    },
    /// Images: import, build, list, inspect, compare, export, remove.
    #[command(subcommand)]
    Image(ImageCommand),
    /// Layers: build, list, what they take and how they are read, collect, remove.
    #[command(subcommand)]
    Layer(LayerCommand),
    /// Environments: create, list, inspect, remove.
    #[command(subcommand)]
    Env(EnvCommand),
    /// API keys: create, list, remove.
    #[command(subcommand)]
    Key(KeyCommand),
    /// Nodes.
    #[command(subcommand)]
    Node(NodeCommand),
    /// Print the OpenAPI document.
    Openapi,
    /// Print completions for a shell.
    Completions {
        /// Which shell.
        shell: Shell,
    },
    /// Print the versions of this program and its server.
    Version,
}

/// `corral up`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  corral up --ephemeral                       leave nothing behind
  corral up --listen 0.0.0.0:7070 --tls-cert cert.pem --tls-key key.pem")]
pub struct UpArgs {
    /// Where everything is kept.
    #[arg(long, default_value = "/var/lib/corral", env = "CORRAL_DATA_DIR")]
    pub data_dir: PathBuf,
    /// Address of the API.
    #[arg(long, default_value = "127.0.0.1:7070")]
    pub listen: SocketAddr,
    /// Certificate chain (PEM).
    #[arg(long, requires = "tls_key", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Private key (PEM).
    #[arg(long, requires = "tls_cert", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Serve plain HTTP beyond loopback: keys and data cross the network in the clear.
    #[arg(long)]
    pub insecure_listen: bool,
    /// The most sandboxes at a time; from the machine's size where absent.
    #[arg(long, value_name = "N")]
    pub max_live: Option<u64>,
    /// Refuse new sandboxes while less memory than this is available.
    #[arg(long, value_name = "MIB")]
    pub memory_floor_mib: Option<u64>,
    /// The most creates under way at a time; more are refused with a time to come back.
    #[arg(long, value_name = "N", default_value = "4096", value_parser = values::positive)]
    pub start_queue: usize,
    /// How long ended sandboxes, their results and their output stay readable; at least 1s.
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = values::keep_time)]
    pub keep_ended: Duration,
    /// The most output kept of a live sandbox's ended commands, together; that of the first to end goes first.
    #[arg(long, value_name = "MIB", default_value = "512")]
    pub keep_output_mib: u32,
    /// The space for writable layers is taken from the disk in steps of this size.
    #[arg(long, value_name = "MIB", default_value = "8192", value_parser = values::disk_step)]
    pub disk_step_mib: u64,
    /// Space on the disk of the data directory that is never taken for writable layers.
    #[arg(long, value_name = "MIB", default_value = "4096")]
    pub disk_reserve_mib: u32,
    /// Store of layers that nodes share: file:///dir (also NFS, CephFS, 3FS) or s3://bucket/prefix?region=…&endpoint=….
    #[arg(long, value_name = "URL", env = "CORRAL_STORE")]
    pub store: Option<corral_node::StoreUrl>,
    /// Fetch layers whole before a sandbox starts on them, instead of as they are read.
    #[arg(long, requires = "store")]
    pub whole_layers: bool,
    /// The most data of layers that is kept here although the store has it, too; half of the disk where absent. That which
    /// was used longest ago goes first, and what a live sandbox has stays.
    #[arg(long, value_name = "MIB", requires = "store", conflicts_with = "whole_layers", value_parser = values::cache_mib)]
    pub cache_mib: Option<u32>,
    /// Keep everything in a temporary directory that is removed at the end, whatever --data-dir says.
    #[arg(long)]
    pub ephemeral: bool,
}

/// `corral down`.
#[derive(Debug, Args)]
#[command(after_help = "\
Sandboxes outlive `corral up`, so that it can be restarted. This ends them with their keepers, unmounts layers, detaches
the loop device and removes control groups. Images, environments and records stay in the data directory.

Examples:
  corral down                                 after `corral up` has ended, such as before a machine is given away
  corral down --data-dir /srv/corral")]
pub struct DownArgs {
    /// The directory that was served.
    #[arg(long, default_value = "/var/lib/corral", env = "CORRAL_DATA_DIR")]
    pub data_dir: PathBuf,
}

/// `corral doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Where `corral up` is to keep everything: its file system is looked at.
    #[arg(long, default_value = "/var/lib/corral", env = "CORRAL_DATA_DIR")]
    pub data_dir: PathBuf,
}

/// What a new sandbox is like.
#[derive(Debug, Clone, Args)]
pub struct SandboxArgs {
    /// Variable of every command.
    #[arg(short, long = "env", value_name = "K=V", value_parser = key_value)]
    pub env: Vec<Pair>,
    #[command(flatten)]
    pub startup: EntrypointArgs,
    /// Label to find it by.
    #[arg(short, long = "label", value_name = "K=V", value_parser = key_value)]
    pub labels: Vec<Pair>,
    /// Memory limit.
    #[arg(long, value_name = "MIB")]
    pub memory_mib: Option<u32>,
    /// CPU limit in cores.
    #[arg(long, value_name = "CORES")]
    pub cpus: Option<f64>,
    /// Disk limit.
    #[arg(long, value_name = "MIB")]
    pub disk_mib: Option<u32>,
    /// Limit of processes and threads.
    #[arg(long, value_name = "N")]
    pub pids: Option<u32>,
    /// Limit of open files of each process.
    #[arg(long, value_name = "N")]
    pub open_files: Option<u32>,
    /// Host name inside [default: sandbox].
    #[arg(long, value_name = "NAME")]
    pub hostname: Option<String>,
    /// Ends after this long without a request (such as 90s, 10m, 2h).
    #[arg(long, value_name = "TIME", value_parser = milliseconds)]
    pub idle_ttl: Option<u64>,
    /// Ends this long after its creation.
    #[arg(long, value_name = "TIME", value_parser = milliseconds)]
    pub max_ttl: Option<u64>,
    /// Let set-user-id programs such as sudo gain rights inside.
    #[arg(long)]
    pub allow_setuid: bool,
}

/// How a command runs.
#[derive(Debug, Clone, Args)]
pub struct CommandArgs {
    /// Working directory.
    #[arg(short = 'w', long = "cwd", value_name = "DIR")]
    pub cwd: Option<String>,
    /// User, or user:group.
    #[arg(short, long)]
    pub user: Option<String>,
    /// Kill it and everything it started after this long (such as 90s, 10m).
    #[arg(long, value_name = "TIME", value_parser = milliseconds)]
    pub timeout: Option<u64>,
}

/// `corral run`.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit code: the command's own; 124 when it reached its limit; 125 when Corral failed.

Examples:
  corral run python -- python -c 'print(1)'
  corral run --memory-mib 2048 --timeout 10m task-17 -- make test")]
pub struct RunArgs {
    #[command(flatten)]
    pub sandbox: SandboxArgs,
    #[command(flatten)]
    pub command: CommandArgs,
    /// Do not remove the sandbox.
    #[arg(long)]
    pub keep: bool,
    /// Environment or image.
    pub environment: String,
    /// Program and arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    pub argv: Vec<String>,
}

/// `corral create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    #[command(flatten)]
    pub sandbox: SandboxArgs,
    /// Environment or image.
    pub environment: String,
}

/// `corral exec`.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit code: the command's own; 124 when it reached its limit; 125 when Corral failed.

Examples:
  corral exec $id -- ls -l /
  corral exec -i $id -- tar -x < files.tar
  corral exec -d $id -- ./server              print the command's id and return")]
pub struct ExecArgs {
    /// Pass standard input on.
    #[arg(short, long)]
    pub interactive: bool,
    /// Leave it running and print its id.
    #[arg(short, long, conflicts_with = "interactive")]
    pub detach: bool,
    #[command(flatten)]
    pub command: CommandArgs,
    /// Variable of this command.
    #[arg(short, long = "env", value_name = "K=V", value_parser = key_value)]
    pub env: Vec<Pair>,
    /// The same key again returns the recorded result instead of running the command again.
    #[arg(long, value_name = "KEY")]
    pub step_key: Option<String>,
    /// Sandbox id.
    pub id: String,
    /// Program and arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    pub argv: Vec<String>,
}

/// `corral sh`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  corral sh $id
  corral sh -u root $id -- python             a program instead of the shell
  corral sh $id --attach c4k…                 come back to a terminal")]
pub struct ShArgs {
    /// Working directory.
    #[arg(short = 'w', long = "cwd", value_name = "DIR")]
    pub cwd: Option<String>,
    /// User, or user:group.
    #[arg(short, long)]
    pub user: Option<String>,
    /// Come back to the terminal of this command.
    #[arg(long, value_name = "COMMAND", conflicts_with = "argv")]
    pub attach: Option<String>,
    /// Sandbox id.
    pub id: String,
    /// Program and arguments; the shell where absent.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    pub argv: Vec<String>,
}

/// `corral cp`.
#[derive(Debug, Args)]
#[command(after_help = "\
One side is ID:/path, the other a local path or - for a stream.

Examples:
  corral cp ./repo $id:/work                  /work/repo where /work exists, else /work
  corral cp $id:/work/result.json .
  corral cp $id:/work/log.txt - | tail")]
pub struct CpArgs {
    /// What to copy.
    pub source: String,
    /// Where to.
    pub target: String,
    /// Act as this user inside.
    #[arg(short, long)]
    pub user: Option<String>,
}

/// `corral ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    /// Ended ones too.
    #[arg(short, long)]
    pub all: bool,
    /// In this state only.
    #[arg(long)]
    pub state: Option<String>,
    /// With this label.
    #[arg(short, long = "label", value_name = "K=V", value_parser = key_value)]
    pub labels: Vec<Pair>,
    /// Of this environment.
    #[arg(long)]
    pub environment: Option<String>,
    /// Print ids only.
    #[arg(short, long)]
    pub quiet: bool,
}

/// `corral logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Sandbox id.
    pub id: String,
    /// Command id.
    pub command: String,
    /// Go on until it ends.
    #[arg(short, long)]
    pub follow: bool,
    /// One stream only.
    #[arg(long, value_parser = values::stream_name)]
    pub stream: Option<StreamName>,
}

/// `corral events`.
#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Go on as they come.
    #[arg(short, long)]
    pub follow: bool,
    /// Events after this sequence number.
    #[arg(long, value_name = "SEQ")]
    pub after: Option<u64>,
    /// Of this sandbox only.
    #[arg(long, value_name = "ID")]
    pub sandbox: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_follows_the_environment_is_the_command() {
        for line in
            ["corral run -e A=1 --timeout 2m img -- ls --json -e", "corral run -e A=1 --timeout 2m img ls --json -e"]
        {
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            assert!(!cli.json);
            let Command::Run(run) = cli.command else { panic!("{line}") };
            assert_eq!((run.environment.as_str(), run.command.timeout), ("img", Some(120_000)));
            assert_eq!(run.argv, ["ls", "--json", "-e"]);
            assert_eq!(run.sandbox.env, [("A".to_owned(), "1".to_owned())]);
        }
        for line in ["corral run img", "corral exec -i -d x ls", "corral up --tls-cert x", "corral env create x"] {
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
