//! The container backend: namespaces and cgroups over the host's kernel, started by the keeper.

pub mod files;
mod platform;

use crate::RuntimeError;
use crate::cgroup::{self, CgroupDriver};
use crate::keeper_link::KeeperLink;
use crate::writable::WritableStore;
use corral_api::environment::Limits;
use corral_api::ids::{CommandId, SandboxId};
use corral_api::sandbox::SandboxStats;
use corral_keeper::protocol::{Io, Launch, Program, Reply, Request, Spawn};
use rustix::fs::{CWD, MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub use platform::DEFAULT_HOSTNAME;
use platform::Platform;

/// First host id of the first sandbox's range; ranges follow each other.
const FIRST_ID: u32 = 0x2000_0000;

/// First host id of a range.
fn first_id(slot: u32) -> u32 {
    FIRST_ID + slot * corral_keeper::launch::IDS_PER_SANDBOX
}
/// Most ranges; ids stay below 2^31, which some programs take for negative.
pub const MAX_SLOTS: u32 = (0x7000_0000 - FIRST_ID) / corral_keeper::launch::IDS_PER_SANDBOX;

/// Longest list of arguments and environment sent inside a message.
const INLINE_PROGRAM: usize = 64 << 10;
/// Longest at all, as the kernel would refuse more.
const MAX_PROGRAM: usize = 2 << 20;

/// The backend.
#[derive(Debug)]
pub struct Containers {
    cgroups: Box<dyn CgroupDriver>,
    writable: WritableStore,
    platform: Platform,
}

/// A container to make.
#[derive(Debug)]
pub struct ContainerSpec {
    /// Its id.
    pub id: SandboxId,
    /// Which range of host ids it uses; no two live containers share one.
    pub slot: u32,
    /// Detached mounts of its layers, lowest first.
    pub layers: Vec<OwnedFd>,
    /// Limits.
    pub limits: Limits,
    /// Host name inside; empty for the usual one.
    pub hostname: String,
    /// Cores; empty for all.
    pub affinity: Vec<u16>,
    /// Set-user-id programs may gain rights.
    pub allow_setuid: bool,
    /// The writable layer or snapshot that its own begins as; an empty one where absent.
    pub from: Option<String>,
}

/// A process to start in a container.
#[derive(Debug)]
pub struct ProcessSpec {
    /// In which container.
    pub sandbox: SandboxId,
    /// Its id.
    pub command: CommandId,
    /// The container's range of user ids.
    pub slot: u32,
    /// What to run.
    pub program: Program,
    /// As whom.
    pub user: crate::users::User,
    /// Limit on open files.
    pub open_files: u32,
    /// Cores; empty for all.
    pub affinity: Vec<u16>,
    /// Set-user-id programs may gain rights.
    pub allow_setuid: bool,
    /// Streams.
    pub io: Io,
}

/// A process that runs.
#[derive(Debug)]
pub struct Started {
    /// Process id on the host.
    pub pid: i32,
    /// Write end of standard input, or the terminal.
    pub input: Option<OwnedFd>,
}

impl Containers {
    /// Prepares the backend in a data directory. `name` is the node's own name in every cgroup tree. Blocks.
    ///
    /// # Errors
    /// When the host lacks what containers need.
    pub fn open(data_dir: &Path, name: &str, writable: crate::writable::WritableConfig) -> Result<Self, RuntimeError> {
        // The control groups last: a start that fails for want of space leaves none.
        let writable = WritableStore::open(data_dir, writable)?;
        let platform = Platform::open(data_dir)?;
        Ok(Self { cgroups: cgroup::open(name)?, writable, platform })
    }

    /// Gives back what this took of the host, once no container is left: cgroups and mounts.
    ///
    /// # Errors
    /// All that could not be given back.
    pub fn detach(&self) -> Result<(), Vec<RuntimeError>> {
        let results = [self.cgroups.remove_base(), self.writable.detach(), self.platform.detach()];
        let errors: Vec<RuntimeError> = results.into_iter().filter_map(Result::err).collect();
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// The cgroups.
    pub fn cgroups(&self) -> &dyn CgroupDriver {
        self.cgroups.as_ref()
    }

    /// The writable layers.
    pub fn writable(&self) -> &WritableStore {
        &self.writable
    }

    /// Makes and starts a container. On failure nothing of it is left.
    ///
    /// # Errors
    /// The step that failed.
    pub async fn create(self: &Arc<Self>, keeper: &KeeperLink, spec: ContainerSpec) -> Result<Started, RuntimeError> {
        let this = self.clone();
        let id = spec.id.clone();
        let prepared = tokio::task::spawn_blocking(move || this.prepare(spec)).await.map_err(|_| RuntimeError::Gone)?;
        let started = match prepared {
            Ok((launch, fds)) => {
                let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
                keeper.call(Request::Launch(launch), &fds).await.and_then(|(reply, input)| started(reply, input))
            }
            Err(error) => Err(error),
        };
        if let Err(error) = &started {
            tracing::debug!(sandbox_id = %id, %error, "a container could not be started");
            self.remove(&id).await?;
        }
        started
    }

    fn prepare(&self, spec: ContainerSpec) -> Result<(Launch, Vec<OwnedFd>), RuntimeError> {
        let id = spec.id.as_str();
        self.cgroups.create(id, &spec.limits)?;
        let mut fds = self.cgroups.entrances(id)?;
        let cgroups = fds.len() as u8;
        fds.push(cgroup::open_unified(self.cgroups.as_ref(), id)?);
        let dir = self.writable.create(id, u64::from(spec.limits.disk_mib) << 20, spec.from.as_deref())?;
        fds.push(
            clone_mount(&dir).map_err(|e| RuntimeError::host("clone the mount of", self.writable.path_of(id), e))?,
        );
        let (binds, bound) = self.platform.binds(&spec.limits)?;
        fds.extend(bound);
        let hostname = if spec.hostname.is_empty() { DEFAULT_HOSTNAME.to_owned() } else { spec.hostname };
        fds.push(self.platform.top_layer()?);
        let lowers = 1 + spec.layers.len() as u16;
        // Overlay wants the topmost first.
        fds.extend(spec.layers.into_iter().rev());
        if fds.len() > corral_keeper::wire::MAX_FDS {
            return Err(RuntimeError::Unsupported(format!("{lowers} layers: fewer fit into one sandbox")));
        }
        let launch = Launch {
            sandbox: spec.id,
            id_base: first_id(spec.slot),
            write_names: hostname != DEFAULT_HOSTNAME,
            hostname,
            affinity: spec.affinity,
            allow_setuid: spec.allow_setuid,
            cgroups,
            unified: true,
            binds,
            lowers,
        };
        Ok((launch, fds))
    }

    /// Starts a process. `logs` are its empty log files: standard output, standard error unless merged, control.
    ///
    /// # Errors
    /// The step that failed; a program that cannot be executed is `Start` at step `Exec`.
    pub async fn start(
        &self,
        keeper: &KeeperLink,
        spec: ProcessSpec,
        logs: Vec<OwnedFd>,
    ) -> Result<Started, RuntimeError> {
        let sandbox = spec.sandbox.as_str();
        let mut fds = self.cgroups.entrances(sandbox)?;
        let cgroups = fds.len() as u8;
        fds.push(cgroup::create_command(self.cgroups.as_ref(), sandbox, spec.command.as_str())?);
        fds.extend(logs);
        let (program, memfd) = pack(spec.program)?;
        fds.extend(memfd);
        let command = spec.command.clone();
        let request = Request::Spawn(Spawn {
            sandbox: spec.sandbox.clone(),
            command: spec.command,
            program,
            id_base: first_id(spec.slot),
            uid: spec.user.uid,
            gid: spec.user.gid,
            groups: spec.user.groups,
            open_files: spec.open_files,
            affinity: spec.affinity,
            allow_setuid: spec.allow_setuid,
            io: spec.io,
            cgroups,
            unified: true,
        });
        let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let result = keeper.call(request, &borrowed).await.and_then(|(reply, input)| started(reply, input));
        if result.is_err() {
            cgroup::remove_command(self.cgroups.as_ref(), sandbox, command.as_str());
        }
        result
    }

    /// Starts a file worker and returns the node's end of its socket.
    async fn start_worker(
        &self,
        keeper: &KeeperLink,
        sandbox: &SandboxId,
        user: &crate::users::User,
    ) -> Result<tokio::net::UnixStream, RuntimeError> {
        const OPEN_FILES: u32 = 64;
        let (ours, theirs) =
            std::os::unix::net::UnixStream::pair().map_err(|e| RuntimeError::host("make", "a socket pair", e))?;
        let mut fds = self.cgroups.entrances(sandbox.as_str())?;
        let cgroups = fds.len() as u8;
        fds.push(cgroup::open_unified(self.cgroups.as_ref(), sandbox.as_str())?);
        fds.push(theirs.into());
        let request = Request::Spawn(Spawn {
            sandbox: sandbox.clone(),
            command: CommandId::random(),
            program: Some(Program { argv: vec!["files".into()], env: Vec::new(), cwd: "/".into() }),
            // For pipes, of which a worker has none.
            id_base: 0,
            uid: user.uid,
            gid: user.gid,
            groups: user.groups.clone(),
            open_files: OPEN_FILES,
            affinity: Vec::new(),
            allow_setuid: false,
            io: Io::Worker,
            cgroups,
            unified: true,
        });
        let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        keeper.call(request, &borrowed).await.and_then(|(reply, input)| started(reply, input))?;
        ours.set_nonblocking(true)
            .and_then(|()| tokio::net::UnixStream::from_std(ours))
            .map_err(|e| RuntimeError::host("use", "a socket pair", e))
    }

    /// Kills everything in a container; its end shows in the keeper's notice.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn kill(&self, id: &SandboxId) -> Result<(), RuntimeError> {
        // Frozen processes die of cgroup.kill too.
        cgroup::kill(self.cgroups.as_ref(), id.as_str(), None)
    }

    /// Kills everything a command started.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn kill_command(&self, id: &SandboxId, command: &CommandId) -> Result<(), RuntimeError> {
        cgroup::kill(self.cgroups.as_ref(), id.as_str(), Some(command.as_str()))
    }

    /// Freezes or thaws a container, and waits until it is so.
    ///
    /// # Errors
    /// When the kernel refuses, or a process does not stop within seconds.
    pub async fn set_frozen(&self, id: &SandboxId, frozen: bool) -> Result<(), RuntimeError> {
        const TRIES: u32 = 2000;
        cgroup::set_frozen(self.cgroups.as_ref(), id.as_str(), frozen)?;
        for _ in 0..TRIES {
            if cgroup::is_frozen(self.cgroups.as_ref(), id.as_str()) == frozen {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        if frozen {
            cgroup::set_frozen(self.cgroups.as_ref(), id.as_str(), false)?;
        }
        Err(RuntimeError::Unsupported("a process in the sandbox cannot be stopped now".into()))
    }

    /// Figures of a container.
    ///
    /// # Errors
    /// When it is gone.
    pub fn stats(&self, id: &SandboxId) -> Result<SandboxStats, RuntimeError> {
        let mut stats = self.cgroups.stats(id.as_str())?;
        stats.disk_bytes = self.writable.usage(id.as_str());
        Ok(stats)
    }

    /// Removes what a dead container leaves: cgroups and writable layer. Kills what still lives. Idempotent.
    ///
    /// # Errors
    /// When something cannot be removed; the rest is removed all the same.
    pub async fn remove(self: &Arc<Self>, id: &SandboxId) -> Result<(), RuntimeError> {
        /// Dying processes leave within milliseconds; one in an uninterruptible wait may take seconds.
        const TRIES: u32 = 500;
        self.kill(id)?;
        let mut pause = Duration::from_micros(500);
        for attempt in 0.. {
            let this = self.clone();
            let name = id.clone();
            let removed = tokio::task::spawn_blocking(move || this.cgroups.remove(name.as_str()))
                .await
                .map_err(|_| RuntimeError::Gone)?;
            match removed {
                Ok(()) => break,
                Err(error) if attempt == TRIES => {
                    self.remove_writable(id).await?;
                    return Err(error);
                }
                Err(_) => tokio::time::sleep(pause).await,
            }
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        self.remove_writable(id).await
    }

    async fn remove_writable(self: &Arc<Self>, id: &SandboxId) -> Result<(), RuntimeError> {
        let (this, name) = (self.clone(), id.clone());
        tokio::task::spawn_blocking(move || this.writable.remove(name.as_str()))
            .await
            .map_err(|_| RuntimeError::Gone)?
    }

    /// Ids of everything on the host that belongs to a container: cgroups and writable layers.
    ///
    /// # Errors
    /// When the trees cannot be read.
    pub fn list(&self) -> Result<Vec<SandboxId>, RuntimeError> {
        let mut names = self.cgroups.list()?;
        names.extend(self.writable.list()?);
        names.sort_unstable();
        names.dedup();
        Ok(names.iter().filter_map(|n| n.parse().ok()).collect())
    }
}

fn started(reply: Reply, input: Option<OwnedFd>) -> Result<Started, RuntimeError> {
    match reply {
        Reply::Started { pid, .. } => Ok(Started { pid, input }),
        Reply::Failed { step, errno } => Err(RuntimeError::Start { step, errno }),
        Reply::Refused { reason } => Err(RuntimeError::Refused(reason)),
        Reply::Unknown => Err(RuntimeError::Gone),
        Reply::Keeper { .. } | Reply::Hello { .. } | Reply::Done => Err(RuntimeError::KeeperLost),
    }
}

/// A fresh detached mount of the tree at an open directory.
fn clone_mount(dir: &OwnedFd) -> Result<OwnedFd, Errno> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    open_tree(dir.as_fd(), "", flags)
}

/// A fresh detached mount of a path.
fn clone_path(path: &Path) -> Result<OwnedFd, RuntimeError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    open_tree(CWD, path, flags).map_err(|e| RuntimeError::host("clone the mount of", path, e))
}

/// Leaves a program in the message, or puts it into a memfd when it is long.
fn pack(program: Program) -> Result<(Option<Program>, Option<OwnedFd>), RuntimeError> {
    let length: usize = program.argv.iter().chain(&program.env).map(|s| s.len() + 9).sum();
    if length > MAX_PROGRAM {
        return Err(RuntimeError::ProgramTooLong(length));
    }
    if length <= INLINE_PROGRAM {
        return Ok((Some(program), None));
    }
    let failed = |e: Errno| RuntimeError::host("fill", "a memfd", e);
    let bytes = postcard::to_stdvec(&program).map_err(|_| RuntimeError::ProgramTooLong(length))?;
    let memfd = memfd_create("program", MemfdFlags::CLOEXEC).map_err(failed)?;
    let mut at = 0;
    while at < bytes.len() {
        at += rustix::io::pwrite(&memfd, &bytes[at..], at as u64).map_err(failed)?;
    }
    Ok((None, Some(memfd)))
}
