//! Finding a holder, or starting one.

use super::{LazyLink, LinkError};
use crate::Lifeline;
use crate::control::Who;
use crate::holder;
use crate::options::Options;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// How long a holder may take to be ready.
const READY_WITHIN: Duration = Duration::from_secs(20);
/// How long one that was killed may take to be gone.
const GONE_WITHIN: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// A file cannot be used.
    #[error("{what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The holder ended before it was ready.
    #[error("the holder ended with {status}; its words are in {}", log.display())]
    Ended {
        /// How.
        status: ExitStatus,
        /// Where it wrote.
        log: PathBuf,
    },
    /// It is not ready in time.
    #[error("the holder is not ready")]
    NotReady(#[source] LinkError),
    /// One that does not answer cannot be ended: it waits in the kernel, for a disk perhaps.
    #[error("the holder does not answer and does not end: processes {0:?}")]
    Stuck(Vec<i32>),
}

/// A server that answers.
#[derive(Debug)]
pub struct LazyProcess {
    /// The connection to it.
    pub link: LazyLink,
    /// Who it is: of another build, where it was running already and is not of this program.
    pub who: Who,
    /// The holder, where it was started now. It goes on when this is dropped; its status is to be waited for by whoever
    /// outlives it.
    pub started: Option<Child>,
}

impl LazyProcess {
    /// Connects to the holder that runs, or starts one from a program, in a session of its own so that it outlives the
    /// caller. It writes to `log`. One that does not answer is ended, and its readers go on with the one that is started.
    ///
    /// # Errors
    /// None can be started, or it is not ready in time.
    pub async fn ensure(program: &Path, options: &Options, log: &Path) -> Result<Self, ProcessError> {
        let root = &options.server.root;
        let found = match answering(&options.socket).await {
            // A server may be starting.
            Err(_) if holder::is_held(root) => ready(&options.socket, None, log).await.ok(),
            answer => answer.ok(),
        };
        match found {
            Some((link, who)) => Ok(Self { link, who, started: None }),
            None if holder::is_held(root) => Self::replace(program, options, log).await,
            None => Self::begin(program, options, log, &[]).await,
        }
    }

    /// Ends a holder and a server that do not answer, and starts others that go on with their connection.
    ///
    /// # Errors
    /// They cannot be ended, or none can be started.
    pub async fn replace(program: &Path, options: &Options, log: &Path) -> Result<Self, ProcessError> {
        let root = &options.server.root;
        let kept = holder::processes(root).into_iter().find_map(|pid| Lifeline::of(pid).ok());
        end(root).await?;
        match kept {
            Some(kept) => Self::go_on(program, options, log, &kept).await,
            None => Self::begin(program, options, log, &[]).await,
        }
    }

    /// Starts a holder that goes on with what was kept of one that is gone. Its readers have been waiting.
    ///
    /// # Errors
    /// It cannot be started, or is not ready in time.
    pub async fn go_on(program: &Path, options: &Options, log: &Path, kept: &Lifeline) -> Result<Self, ProcessError> {
        Self::begin(program, options, log, &["--from".to_owned(), kept.word()]).await
    }

    async fn begin(program: &Path, options: &Options, log: &Path, words: &[String]) -> Result<Self, ProcessError> {
        let mut child = start(program, words, options, log)?;
        let (link, who) = ready(&options.socket, Some(&mut child), log).await?;
        Ok(Self { link, who, started: Some(child) })
    }
}

/// Kills all that serve a root, and waits until they are gone.
///
/// # Errors
/// [`ProcessError::Stuck`].
pub async fn end(root: &Path) -> Result<(), ProcessError> {
    let until = Instant::now() + GONE_WITHIN;
    while holder::is_held(root) {
        if Instant::now() > until {
            return Err(ProcessError::Stuck(holder::processes(root)));
        }
        // Again and again: a holder may have started a server meanwhile.
        holder::kill(root);
        sleep(LOOK_EVERY).await;
    }
    Ok(())
}

fn start(program: &Path, words: &[String], options: &Options, log: &Path) -> Result<Child, ProcessError> {
    let failed = |what, path: &Path| {
        let path = path.to_owned();
        move |source| ProcessError::Io { what, path, source }
    };
    let open = || OpenOptions::new().create(true).append(true).mode(0o600).open(log);
    let (out, err) = (open().map_err(failed("open", log))?, open().map_err(failed("open", log))?);
    let mut command = Command::new(program);
    // It leaves the session itself.
    command.arg("hold").args(words).args(options.words()).stdin(Stdio::null()).stdout(out).stderr(err);
    command.spawn().map_err(failed("start", program))
}

async fn ready(socket: &Path, mut child: Option<&mut Child>, log: &Path) -> Result<(LazyLink, Who), ProcessError> {
    let until = Instant::now() + READY_WITHIN;
    loop {
        let why = match answering(socket).await {
            Ok(found) => return Ok(found),
            Err(why) => why,
        };
        if let Some(child) = &mut child
            && let Ok(Some(status)) = child.try_wait()
        {
            return Err(ProcessError::Ended { status, log: log.to_owned() });
        }
        if Instant::now() > until {
            return Err(ProcessError::NotReady(why));
        }
        sleep(LOOK_EVERY).await;
    }
}

async fn answering(socket: &Path) -> Result<(LazyLink, Who), LinkError> {
    const LONGEST: Duration = Duration::from_secs(5);
    let ask = async {
        let mut link = LazyLink::connect(socket).await?;
        let who = link.who().await?;
        Ok((link, who))
    };
    timeout(LONGEST, ask).await.map_err(|_| LinkError::Timeout)?
}
