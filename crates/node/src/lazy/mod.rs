//! The server of lazy reads, as this node uses it: started once, told which layers are about to be read, listened to.
//!
//! It is a process of its own that outlives the node. What it tells is brought to the sandboxes and commands it is about:
//! a read that failed marks the command that made it, a layer that is complete is mounted from its own data from then on.

mod guard;
mod metrics;

use crate::config::StoreUrl;
use crate::ledger::Change;
use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::catalogue::LayerReads;
use corral_api::digest::Digest;
use corral_api::ids::{CommandId, SandboxId};
use corral_api::sandbox::{Cause, EventKind, SandboxStats};
use corral_lazy::client::{LazyLink, LazyProcess, LinkError, ProcessError};
use corral_lazy::control::{After, Event, EventLine, Stats};
use corral_lazy::options::Options;
use corral_lazy::{LayerId, Lifeline, holder};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Its control socket in the node's directory of sockets.
const SOCKET: &str = "lazy.sock";
/// Up to where its events were heard, beside the socket.
const HEARD: &str = "lazy.heard";
/// Between tries to reach a server that is being started anew.
const PAUSE: Duration = Duration::from_millis(100);
/// How often it is tried: a server is started anew within some tens of milliseconds.
const TRIES: u32 = 50;

/// The server.
#[derive(Debug)]
pub struct Lazy {
    socket: PathBuf,
    /// The directory that it serves.
    root: PathBuf,
    /// How it is started.
    home: Option<Home>,
    link: tokio::sync::Mutex<Option<LazyLink>>,
    /// Whether none may be started any more. Held while one is.
    retired: tokio::sync::Mutex<bool>,
}

/// How a server is started.
#[derive(Debug)]
struct Home {
    program: PathBuf,
    options: Options,
    log: PathBuf,
}

impl Lazy {
    /// Takes over the server that runs, or starts one. A server of another build is replaced under its readers.
    ///
    /// # Errors
    /// It cannot be started.
    pub async fn ensure(program: &Path, root: &Path, run: &Path, store: &StoreUrl) -> Result<Self, ProcessError> {
        let socket = run.join(SOCKET);
        let options = Options::new(root, store.text.clone(), &socket);
        let home = Home { program: program.to_owned(), options, log: run.join("lazy.log") };
        let process = LazyProcess::ensure(program, &home.options, &home.log).await?;
        let who = process.who.clone();
        let mut link = Some(reaped(process));
        let build = std::fs::read(program).map(|bytes| blake3::hash(&bytes).to_string());
        if build.is_ok_and(|build| build != who.build)
            && let Some(old) = link.take()
        {
            match old.upgrade(program).await {
                Ok(()) => tracing::info!("the server of lazy reads goes on as another version"),
                Err(error) => tracing::warn!(%error, "the server of lazy reads stays at another version"),
            }
        }
        Ok(Self {
            socket,
            root: root.to_owned(),
            home: Some(home),
            link: tokio::sync::Mutex::new(link),
            retired: tokio::sync::Mutex::default(),
        })
    }

    /// The server that an earlier run of the node has left for a directory, be it that it answers or not.
    pub fn find(root: &Path, run: &Path) -> Option<Self> {
        holder::is_held(root).then(|| Self {
            socket: run.join(SOCKET),
            root: root.to_owned(),
            home: None,
            link: tokio::sync::Mutex::default(),
            retired: tokio::sync::Mutex::default(),
        })
    }

    /// Starts a server where there is none, with what was kept of a connection. Says whether it did.
    async fn start_with(&self, kept: Option<&Lifeline>) -> Result<bool, ProcessError> {
        let Some(Home { program, options, log }) = &self.home else { return Ok(false) };
        let retired = self.retired.lock().await;
        if *retired {
            return Ok(false);
        }
        let process = match kept {
            Some(kept) => LazyProcess::go_on(program, options, log, kept).await?,
            None => LazyProcess::ensure(program, options, log).await?,
        };
        *self.link.lock().await = Some(reaped(process));
        Ok(true)
    }

    /// Sees to it that no server is started any more. One that does not answer is ended with its holder, so that what
    /// waits for its reads can be ended and unmounted.
    ///
    /// # Errors
    /// They do not end.
    pub async fn retire(&self) -> Result<(), ProcessError> {
        const WITHIN: Duration = Duration::from_secs(10);
        *self.retired.lock().await = true;
        let ask = async { LazyLink::connect(&self.socket).await?.who().await };
        if !holder::is_held(&self.root) || matches!(tokio::time::timeout(WITHIN, ask).await, Ok(Ok(_))) {
            return Ok(());
        }
        tracing::error!("the server of lazy reads does not answer: it is killed, with its holder");
        corral_lazy::client::end(&self.root).await
    }

    /// A connection, made anew where the last one broke. The server may be on its way, so it is tried for a while.
    async fn connected(&self, held: &mut Option<LazyLink>) -> Result<LazyLink, LinkError> {
        if let Some(link) = held.take() {
            return Ok(link);
        }
        for _ in 1..TRIES {
            if let Ok(link) = LazyLink::connect(&self.socket).await {
                return Ok(link);
            }
            tokio::time::sleep(PAUSE).await;
        }
        LazyLink::connect(&self.socket).await
    }

    /// Says that a layer is about to be read by a task of this class.
    ///
    /// # Errors
    /// The server refuses or cannot be reached.
    pub async fn open(&self, digest: &Digest, class: &str) -> Result<(), LinkError> {
        let mut held = self.link.lock().await;
        for _ in 1..TRIES {
            let mut link = self.connected(&mut held).await?;
            match link.open(layer_id(digest), class).await {
                // The server was started anew.
                Err(LinkError::Io(_)) => {}
                answer => {
                    *held = Some(link);
                    return answer.map(|_| ());
                }
            }
        }
        Err(LinkError::Timeout)
    }

    /// Up to where events were heard before the node started.
    async fn heard(&self) -> Option<After> {
        let text = tokio::fs::read(self.socket.with_file_name(HEARD)).await.ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Notes up to where events were heard. Where that fails they are heard twice.
    async fn note_heard(&self, after: After) {
        let text = serde_json::to_vec(&after).unwrap_or_default();
        if let Err(error) = tokio::fs::write(self.socket.with_file_name(HEARD), text).await {
            tracing::debug!(%error, "what was heard of the server of lazy reads is not noted");
        }
    }

    /// Counters.
    ///
    /// # Errors
    /// The server cannot be reached.
    pub async fn stats(&self) -> Result<Stats, LinkError> {
        let mut held = self.link.lock().await;
        for _ in 1..TRIES {
            let mut link = self.connected(&mut held).await?;
            match link.stats().await {
                Err(LinkError::Io(_)) => {}
                answer => {
                    *held = Some(link);
                    return answer;
                }
            }
        }
        Err(LinkError::Timeout)
    }

    /// Has the server drop the data of a layer; says how many bytes it took. By a connection of its own: it may take long.
    ///
    /// # Errors
    /// The server refuses or cannot be reached.
    pub async fn evict(&self, digest: &Digest) -> Result<u64, LinkError> {
        LazyLink::connect(&self.socket).await?.evict(layer_id(digest)).await
    }

    /// Ends the server and its holder; the directory it offers is unmounted.
    ///
    /// # Errors
    /// They do not end.
    pub async fn end(&self) -> Result<(), ProcessError> {
        const WITHIN: Duration = Duration::from_secs(10);
        // The holder first: it takes its server with it, and unmounts. Of two that are stopped, or that stand still,
        // nobody hears that.
        let is_holder = |pid: &i32| {
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|words| words.split(|b| *b == 0).any(|w| w == b"hold"))
        };
        for pid in holder::processes(&self.root).into_iter().filter(is_holder) {
            // One that has ended needs no signal.
            corral_sys::process::kill(pid, libc::SIGTERM).unwrap_or(());
        }
        let gone = async {
            while holder::is_held(&self.root) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(WITHIN, gone).await.is_err() {
            tracing::warn!("the server of lazy reads does not end when it is told to: it is killed");
            corral_lazy::client::end(&self.root).await?;
        }
        holder::unmount(&self.root);
        Ok(())
    }
}

/// The connection to a process. If it was started now it is waited for: it ends when the node is taken down, or by a fault
/// that its log tells.
fn reaped(process: LazyProcess) -> LazyLink {
    if let Some(mut child) = process.started {
        std::thread::spawn(move || child.wait());
    }
    process.link
}

fn layer_id(digest: &Digest) -> LayerId {
    LayerId::from(*digest.as_bytes())
}

fn digest_of(layer: LayerId) -> Option<Digest> {
    format!("sha256:{layer}").parse().ok()
}

/// The class of a sandbox's task, for what is fetched ahead: its label `class`, as far as a key can hold it.
pub fn class_of(labels: &std::collections::BTreeMap<String, String>) -> String {
    const LONGEST: usize = 64;
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_' | '.');
    let text: String = labels.get("class").map_or("", String::as_str).chars().take(LONGEST).collect();
    let text: String = text.to_lowercase().chars().map(|c| if fits(c) { c } else { '-' }).collect();
    let text = text.trim_start_matches(['-', '_', '.']);
    if text.is_empty() { "default".to_owned() } else { text.to_owned() }
}

/// Whose a control group is: `…/SANDBOX` or `…/SANDBOX/COMMAND`.
fn owner_of(cgroup: &str) -> Option<(SandboxId, Option<CommandId>)> {
    let parts: Vec<&str> = cgroup.trim().rsplit('/').take(3).collect();
    parts.iter().enumerate().find_map(|(depth, part)| {
        let sandbox = part.parse::<SandboxId>().ok()?;
        let command = depth.checked_sub(1).and_then(|below| parts[below].parse().ok());
        Some((sandbox, command))
    })
}

impl Core {
    /// Listens to the server of lazy reads until the node ends.
    pub async fn hear_lazy(self: Arc<Self>, lazy: Arc<Lazy>) {
        let mut after = lazy.heard().await;
        loop {
            let events = match LazyLink::connect(&lazy.socket).await {
                Ok(link) => link.events(after).await,
                Err(error) => Err(error),
            };
            let Ok(mut events) = events else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            let epoch = events.epoch;
            while let Ok(line) = events.next().await {
                match line {
                    EventLine::Event(record) => {
                        let heard = After { epoch, seq: record.seq };
                        self.lazy_event(record.event).await;
                        lazy.note_heard(heard).await;
                        after = Some(heard);
                    }
                    EventLine::Lost(count) => tracing::warn!(count, "events of the server of lazy reads were lost"),
                }
            }
        }
    }

    async fn lazy_event(self: &Arc<Self>, event: Event) {
        match event {
            Event::ReadFailed { layer, cgroup, reason, .. } => {
                let owner = cgroup.as_deref().and_then(owner_of);
                tracing::error!(%layer, ?owner, reason, "data of a layer could not be had");
                if let (Some((sandbox, command)), Some(layer)) = (owner, digest_of(layer))
                    && let Some(sandbox) = self.live(&sandbox)
                {
                    self.read_failed(&sandbox, command, layer, reason);
                }
            }
            Event::CorruptChunk { layer, chunk, pack, tries } => {
                tracing::error!(%layer, chunk, pack, tries, "the shared store has damaged data of a layer");
            }
            Event::Restarted { cause } => {
                tracing::error!(
                    reason = cause.as_str(),
                    "the server of lazy reads was replaced: readers waited and go on"
                );
            }
            Event::Complete { layer } => {
                let Some(digest) = digest_of(layer) else { return };
                let this = self.clone();
                let noted = tokio::task::spawn_blocking(move || this.layers.note_arrived(&digest)).await;
                if let Ok(Err(error)) = noted {
                    tracing::warn!(%digest, error = %crate::error::chain(&error), "a layer that was read whole is not sound");
                }
            }
            _ => {}
        }
    }

    /// Marks the command that a failed read belongs to; all that run, where it is not known.
    fn read_failed(&self, sandbox: &Arc<Sandbox>, command: Option<CommandId>, layer: Digest, message: String) {
        let commands: Vec<_> = sandbox.lock().commands.values().cloned().collect();
        let concerned = commands.iter().filter(|c| command.as_ref().map_or_else(|| c.is_running(), |id| c.id == *id));
        let mut changes = Vec::new();
        for command in concerned {
            let mut record = command.lock();
            record.read_failed = true;
            changes.push(Change::Command(Box::new(record.clone())));
        }
        let what = EventKind::ReadFailed { layer, command_id: command, cause: Cause::Platform, message };
        self.events.record(&self.ledger, &sandbox.id, what, changes);
    }

    /// What was read of layers that are not wholly here.
    pub async fn lazy_reads(&self) -> HashMap<Digest, LayerReads> {
        let Some(lazy) = &self.lazy else { return HashMap::new() };
        let stats = match lazy.stats().await {
            Ok(stats) => stats,
            Err(error) => {
                tracing::warn!(%error, "the server of lazy reads does not tell its counters");
                return HashMap::new();
            }
        };
        let reads = |l: &corral_lazy::control::LayerStats| LayerReads {
            read_bytes: l.reads.read_bytes,
            touched_chunks: l.chunks_touched,
            fetched_bytes: l.reads.fetched_stored_bytes,
            hits: l.reads.hits,
            misses: l.reads.misses,
            errors: l.reads.errors,
            fetches: l.reads.fetch_latency.counts.iter().sum(),
            fetch_us: l.reads.fetch_latency.sum_us,
        };
        stats.layers.iter().filter_map(|l| Some((digest_of(l.layer)?, reads(l)))).collect()
    }

    /// Adds to a sandbox's figures what it read of layers that are read lazily. Leaves them at zero where the server does
    /// not answer.
    pub async fn add_lazy_reads(&self, sandbox: &Sandbox, to: &mut SandboxStats) {
        let Some(lazy) = &self.lazy else { return };
        let Ok(stats) = lazy.stats().await else { return };
        for cgroup in &stats.cgroups {
            if owner_of(&cgroup.cgroup).is_some_and(|(owner, _)| owner == sandbox.id) {
                to.read_bytes += cgroup.read_bytes;
                to.fetched_bytes += cgroup.fetched_stored_bytes;
            }
        }
        let layers = sandbox.lock().record.environment.layers.clone();
        for layer in stats.layers.iter().filter(|l| digest_of(l.layer).is_some_and(|digest| layers.contains(&digest))) {
            to.image_chunks += layer.chunks_total;
            to.image_touched_chunks += layer.chunks_touched;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_groups_tell_whose_they_are() {
        let sandbox = SandboxId::new(&corral_api::ids::NodeId::random());
        let command = CommandId::random();
        let of = |text: String| owner_of(&text);
        assert_eq!(of(format!("0::/a/corral-x/{sandbox}")), Some((sandbox.clone(), None)));
        assert_eq!(of(format!("0::/corral-x/{sandbox}/{command}\n")), Some((sandbox.clone(), Some(command))));
        assert_eq!(of(format!("0::/corral-x/{sandbox}/init")), Some((sandbox, None)));
        assert_eq!(of("0::/init.scope".into()), None);
    }

    #[test]
    fn classes_are_safe_as_keys() {
        let class = |text: &str| class_of(&[("class".to_owned(), text.to_owned())].into());
        assert_eq!(class("SWE bench/17"), "swe-bench-17");
        assert_eq!(class("../.."), "default");
        assert_eq!(class_of(&std::collections::BTreeMap::new()), "default");
    }
}
