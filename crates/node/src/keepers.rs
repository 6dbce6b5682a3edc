//! The node's keepers: how many, which takes the next sandbox, and what happens when one dies.

use corral_api::ids::SandboxId;
use corral_api::problem::{ErrorKind, Problem};
use corral_keeper::protocol::Request;
use corral_runtime::RuntimeError;
use corral_runtime::keeper_link::{KeeperLink, Notice};
use corral_runtime::keeper_process::{self, Programs};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Sandboxes one keeper gets before another is started: less than it may hold, since the counts here run ahead of its.
const COMFORTABLE: usize = corral_keeper::protocol::MAX_SANDBOXES * 3 / 4;

/// One that does not answer within this is stopped or stuck, and with it every start of its sandboxes' commands.
const ANSWERS_WITHIN: Duration = Duration::from_secs(20);
/// How often keepers are asked.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// Most keepers.
const MOST: usize = 64;
/// A keeper's socket is named by its number.
const NAME: &str = "keeper-";
const ENDING: &str = ".sock";

/// The number of the keeper whose socket has this name.
fn index_of(name: &std::ffi::OsStr) -> Option<usize> {
    name.to_str()?.strip_prefix(NAME)?.strip_suffix(ENDING)?.parse().ok().filter(|index| *index < MOST)
}

/// One keeper's place.
#[derive(Debug)]
pub struct Keeper {
    /// Its number.
    pub index: usize,
    socket: PathBuf,
    link: Mutex<Option<Arc<KeeperLink>>>,
    starting: tokio::sync::Mutex<()>,
    /// It does not answer. Its sandboxes go on, but nothing can be started in them.
    stuck: watch::Sender<bool>,
    /// It has no descriptors left: it is given nothing more until then.
    crowded_until: Mutex<Option<Instant>>,
    /// Sandboxes that ended while it did not answer: it has to forget them yet.
    owed: Mutex<Vec<SandboxId>>,
    /// Sandboxes given to it that are not ended.
    pub live: AtomicUsize,
}

/// All keepers.
#[derive(Debug)]
pub struct Keepers {
    programs: Programs,
    /// The node is only to be ended.
    ending: bool,
    keepers: Vec<Arc<Keeper>>,
    notices: mpsc::UnboundedSender<(usize, Notice)>,
}

impl Keeper {
    /// The connection, if it stands.
    pub fn link(&self) -> Option<Arc<KeeperLink>> {
        self.lock().clone().filter(|l| l.is_connected())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Arc<KeeperLink>>> {
        self.link.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The connection.
    ///
    /// # Errors
    /// When the keeper is lost, or does not answer.
    pub fn connected(&self) -> Result<Arc<KeeperLink>, Problem> {
        if self.is_stuck() {
            let text = "the keeper of this sandbox does not answer; what runs in it goes on";
            return Err(Problem::new(ErrorKind::Unavailable, text).retry_after_ms(CHECK_EVERY.as_millis() as u64));
        }
        self.link().ok_or_else(|| {
            Problem::new(ErrorKind::Unavailable, "the keeper of this sandbox was lost").retry_after_ms(1000)
        })
    }

    /// Whether it does not answer.
    pub fn is_stuck(&self) -> bool {
        *self.stuck.borrow()
    }

    /// Waits until it does not answer.
    pub async fn until_stuck(&self) {
        let mut stuck = self.stuck.subscribe();
        // The sender lives as long as the keeper's place.
        let _seen = stuck.wait_for(|stuck| *stuck).await;
    }

    /// Notes that it could take no more descriptors.
    pub fn note_crowded(&self) {
        const FOR: Duration = Duration::from_secs(10);
        *self.crowded_until.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(Instant::now() + FOR);
    }

    fn is_crowded(&self) -> bool {
        let until = *self.crowded_until.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }

    /// Has it forget a sandbox that is dead, later if it does not answer now.
    pub async fn forget(&self, sandbox: &SandboxId) {
        /// What a keeper that works takes is far less.
        const WITHIN: Duration = Duration::from_secs(10);
        let Some(link) = self.link() else { return };
        let asked = tokio::time::timeout(WITHIN, link.ask(Request::Forget { sandbox: sandbox.clone() }));
        let told = if self.is_stuck() { None } else { asked.await.ok() };
        match told {
            Some(Ok(_) | Err(RuntimeError::Gone | RuntimeError::KeeperLost)) => {}
            Some(Err(error)) => {
                tracing::error!(sandbox_id = %sandbox, %error, "the keeper does not forget a sandbox");
                self.lock_owed().push(sandbox.clone());
            }
            None => self.lock_owed().push(sandbox.clone()),
        }
    }

    fn lock_owed(&self) -> std::sync::MutexGuard<'_, Vec<SandboxId>> {
        self.owed.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Has it forget what it was not asked to when that was due.
    async fn settle_owed(&self, link: &KeeperLink) {
        let owed = std::mem::take(&mut *self.lock_owed());
        for sandbox in owed {
            // One whose first process was killed, and is on its way out, is asked again; what a lost keeper held is lost.
            if let Err(RuntimeError::Refused(_)) = link.ask(Request::Forget { sandbox: sandbox.clone() }).await {
                self.lock_owed().push(sandbox);
            }
        }
    }

    /// Kills its process: all that it holds dies with it.
    fn kill(&self) {
        if let Some(pid) = self.link().and_then(|link| link.peer()) {
            // One that has just ended needs no signal.
            corral_sys::process::kill(pid, libc::SIGKILL).unwrap_or(());
        }
    }

    /// Asks whether it still answers. One that does not is not killed, since its sandboxes would die with it: it is
    /// given nothing more until it answers, and a person is told.
    pub async fn check(&self) {
        let Some(link) = self.link() else {
            self.stuck.send_replace(false);
            return;
        };
        // A lost one is no stuck one: it is told by the connection.
        let answers = tokio::time::timeout(ANSWERS_WITHIN, link.who()).await.is_ok();
        let was_stuck = self.stuck.send_replace(!answers);
        if answers {
            self.settle_owed(&link).await;
        }
        if was_stuck != answers {
            return;
        }
        if answers {
            tracing::info!(keeper = self.index, "a keeper answers again");
        } else {
            let within = ANSWERS_WITHIN.as_secs();
            tracing::error!(keeper = self.index, within, "a keeper does not answer: is its process stopped?");
        }
    }

    /// Forgets a broken connection.
    pub fn disconnect(&self) {
        self.lock().take();
    }
}

impl Keepers {
    /// Places for enough keepers for so many sandboxes; none is started yet. Notices of all come with their number.
    pub fn new(
        programs: Programs,
        run_dir: &std::path::Path,
        max_live: u64,
        ending: bool,
        notices: mpsc::UnboundedSender<(usize, Notice)>,
    ) -> Self {
        // Those of an earlier run, which may have taken more, are looked after as well.
        let running =
            std::fs::read_dir(run_dir).into_iter().flatten().flatten().filter_map(|e| index_of(&e.file_name()));
        let last = running.max().map_or(0, |index| index + 1);
        let count = (max_live as usize).div_ceil(COMFORTABLE).clamp(2, MOST).max(last);
        let keepers = (0..count)
            .map(|index| {
                Arc::new(Keeper {
                    index,
                    socket: run_dir.join(format!("{NAME}{index}{ENDING}")),
                    link: Mutex::new(None),
                    starting: tokio::sync::Mutex::new(()),
                    stuck: watch::channel(false).0,
                    crowded_until: Mutex::new(None),
                    owed: Mutex::new(Vec::new()),
                    live: AtomicUsize::new(0),
                })
            })
            .collect();
        Self { programs, ending, keepers, notices }
    }

    /// All places.
    pub fn all(&self) -> &[Arc<Keeper>] {
        &self.keepers
    }

    /// The keeper of this number.
    pub fn get(&self, index: usize) -> Option<&Arc<Keeper>> {
        self.keepers.get(index)
    }

    /// Connects to a keeper that runs already, and reports whether there is one. One that was started with other
    /// programs is replaced by these first. What it holds comes as notices.
    ///
    /// # Errors
    /// When one listens but refuses, such as one of another version.
    pub async fn reconnect(&self, keeper: &Keeper) -> Result<bool, RuntimeError> {
        if !keeper.socket.exists() {
            return Ok(false);
        }
        let connecting = async {
            keeper_process::bring_up_to_date(&self.programs, &keeper.socket).await?;
            self.connect(keeper).await
        };
        let within = if self.ending { Duration::from_secs(5) } else { ANSWERS_WITHIN };
        let connected = tokio::time::timeout(within, connecting).await;
        if connected.is_err() && self.ending {
            // Everything is to end: this one with all that it holds.
            tracing::warn!(keeper = keeper.index, "a keeper that does not answer is killed");
            keeper_process::kill(&keeper.socket).await;
            std::fs::remove_file(&keeper.socket).map_err(|e| RuntimeError::host("remove", &keeper.socket, e))?;
            return Ok(false);
        }
        let connected = connected.unwrap_or_else(|_| {
            let socket = keeper.socket.display();
            Err(RuntimeError::Refused(format!("the keeper at {socket} does not answer: is its process stopped?")))
        });
        match connected {
            Ok(()) => Ok(true),
            // Nobody listens any more.
            Err(RuntimeError::Host { .. } | RuntimeError::KeeperLost) => {
                std::fs::remove_file(&keeper.socket).map_err(|e| RuntimeError::host("remove", &keeper.socket, e))?;
                Ok(false)
            }
            Err(other) => Err(other),
        }
    }

    async fn connect(&self, keeper: &Keeper) -> Result<(), RuntimeError> {
        let (all, index) = (self.notices.clone(), keeper.index);
        let link = KeeperLink::connect(&keeper.socket, move |notice| all.send((index, notice)).is_ok()).await?;
        *keeper.lock() = Some(Arc::new(link));
        Ok(())
    }

    /// The connection of a keeper, which is started when it does not run.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn ensure(&self, keeper: &Keeper) -> Result<Arc<KeeperLink>, RuntimeError> {
        if keeper.is_stuck() {
            return Err(RuntimeError::Refused("the keeper does not answer".to_owned()));
        }
        if let Some(link) = keeper.link() {
            return Ok(link);
        }
        let _one = keeper.starting.lock().await;
        if let Some(link) = keeper.link() {
            return Ok(link);
        }
        let mut child = keeper_process::start(&self.programs, &keeper.socket).await?;
        let index = keeper.index;
        tokio::spawn(async move {
            // Reaps it; its death shows in the connection.
            let status = child.wait().await;
            tracing::info!(keeper = index, ?status, "a keeper ended");
        });
        // Its socket file is there a moment before it listens.
        const TRIES: u32 = 100;
        let mut attempts = 0;
        while let Err(error) = self.connect(keeper).await {
            attempts += 1;
            if !matches!(error, RuntimeError::Host { .. }) || attempts == TRIES {
                return Err(error);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        keeper.link().ok_or(RuntimeError::KeeperLost)
    }

    /// Looks after all keepers until the node ends.
    pub async fn look_after(&self) {
        let mut rounds = tokio::time::interval(CHECK_EVERY);
        rounds.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            rounds.tick().await;
            futures_util::future::join_all(self.keepers.iter().map(|k| k.check())).await;
        }
    }

    /// The keeper that takes the next sandbox; its count is raised.
    pub fn choose(&self) -> Arc<Keeper> {
        // One that does not answer comes last, and fails the create with a time to come back.
        let put_off = |k: &Arc<Keeper>| if k.is_stuck() || k.is_crowded() { COMFORTABLE } else { 0 };
        let load = |k: &Arc<Keeper>| k.live.load(Ordering::Relaxed) + put_off(k);
        let running =
            self.keepers.iter().filter(|k| k.index < 2 || load(k) > 0 || k.link().is_some()).min_by_key(|k| load(k));
        let least = self.keepers.iter().min_by_key(|k| load(k));
        let chosen = match (running, least) {
            (Some(running), _) if load(running) < COMFORTABLE => running,
            (_, Some(least)) => least,
            (Some(running), None) => running,
            // There are always two places.
            (None, None) => &self.keepers[0],
        };
        chosen.live.fetch_add(1, Ordering::Relaxed);
        chosen.clone()
    }

    /// Ends all keepers that hold no sandbox, and waits until they are gone. Returns what went wrong.
    pub async fn shut_down(&self) -> Vec<String> {
        let mut left = Vec::new();
        const GONE_WITHIN: Duration = Duration::from_secs(5);
        for keeper in &self.keepers {
            let Some(link) = keeper.link() else { continue };
            let asked = tokio::time::timeout(GONE_WITHIN, link.ask(Request::Shutdown)).await;
            let Ok(asked) = asked else {
                // Everything is to end: one that does not answer is ended with all that it holds.
                tracing::warn!(keeper = keeper.index, "a keeper that does not answer is killed");
                keeper.kill();
                continue;
            };
            if let Err(error) = asked {
                left.push(format!("keeper {} was not ended: {}", keeper.index, crate::error::chain(&error)));
                continue;
            }
            if tokio::time::timeout(GONE_WITHIN, link.peer_gone()).await.is_err() {
                left.push(format!("keeper {} does not end", keeper.index));
            }
            // One that is gone needs no socket file.
            std::fs::remove_file(&keeper.socket).unwrap_or(());
        }
        left
    }
}
