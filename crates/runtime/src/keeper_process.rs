//! Starting keepers and finding the programs of the node.

use crate::RuntimeError;
use crate::keeper_link::KeeperLink;
use corral_keeper::protocol::{Reply, Request, VERSION};
use std::fs::OpenOptions;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// Programs that the node starts, installed beside it.
#[derive(Debug, Clone)]
pub struct Programs {
    /// `corral-keeper`.
    pub keeper: PathBuf,
    /// `corral-init`.
    pub init: PathBuf,
    /// `corral-guest`.
    pub guest: PathBuf,
    /// Where `corral-lazy` lies, if it is installed.
    pub lazy: PathBuf,
    /// Digest of all three, by which a keeper of another installation is known.
    pub build: String,
}

impl Programs {
    /// Looks in `CORRAL_LIBEXEC`, beside the running program, and in `../libexec/corral` from there.
    ///
    /// # Errors
    /// Names where it looked.
    pub fn find() -> Result<Self, RuntimeError> {
        let mut places = Vec::new();
        if let Some(dir) = std::env::var_os("CORRAL_LIBEXEC") {
            places.push(PathBuf::from(dir));
        } else if let Some(dir) = std::env::current_exe().ok().as_deref().and_then(Path::parent) {
            places.push(dir.to_owned());
            places.push(dir.join("../libexec/corral"));
        }
        for dir in &places {
            let [keeper, init, guest] = ["corral-keeper", "corral-init", "corral-guest"].map(|name| dir.join(name));
            if keeper.is_file() && init.is_file() && guest.is_file() {
                let build = digest_of(&[&keeper, &init, &guest])?;
                return Ok(Self { keeper, init, guest, lazy: dir.join("corral-lazy"), build });
            }
        }
        let looked: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
        Err(RuntimeError::Unsupported(format!(
            "corral-keeper, corral-init and corral-guest are not all in {}: set CORRAL_LIBEXEC to their directory",
            looked.join(" or ")
        )))
    }
}

fn digest_of(programs: &[&Path]) -> Result<String, RuntimeError> {
    let mut all = Vec::new();
    for path in programs {
        all.extend(std::fs::read(path).map_err(|e| RuntimeError::host("read", path, e))?);
    }
    Ok(corral_api::digest::Digest::of(&all).to_string())
}

/// Has a keeper that was started with other programs execute these, with all it holds. One that has something starting
/// is asked again for a while, and left as it is when it still does.
///
/// # Errors
/// When nobody listens, or it speaks another version and cannot be replaced.
pub async fn bring_up_to_date(programs: &Programs, socket: &Path) -> Result<(), RuntimeError> {
    const TRIES: u32 = 100;
    const PAUSE: Duration = Duration::from_millis(50);
    let link = KeeperLink::open(socket, |_| true)?;
    let (version, build) = link.who().await?;
    if build == programs.build {
        return Ok(());
    }
    let files: Vec<std::fs::File> = [&programs.keeper, &programs.init, &programs.guest]
        .into_iter()
        .map(|path| std::fs::File::open(path).map_err(|e| RuntimeError::host("open", path, e)))
        .collect::<Result<_, _>>()?;
    let fds: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    let mut why = String::new();
    for _ in 0..TRIES {
        match link.call(Request::Upgrade { build: programs.build.clone() }, &fds).await {
            // Its descriptor of this connection closed as it executed.
            Err(RuntimeError::KeeperLost) => {
                tracing::info!(socket = %socket.display(), "a keeper goes on as another version");
                return Ok(());
            }
            Ok((Reply::Refused { reason }, _)) => why = reason,
            Ok((answer, _)) => {
                why = format!("{answer:?}");
                break;
            }
            Err(other) => return Err(other),
        }
        tokio::time::sleep(PAUSE).await;
    }
    if version == VERSION {
        tracing::warn!(socket = %socket.display(), why, "a keeper stays at another version");
        return Ok(());
    }
    Err(RuntimeError::Refused(format!("the keeper speaks version {version}, not {VERSION}, and stays: {why}")))
}

/// Kills the keeper that listens at a socket, with all that it holds, and waits until it is gone.
pub async fn kill(socket: &Path) {
    let Ok(link) = KeeperLink::open(socket, |_| true) else { return };
    if let Some(pid) = link.peer() {
        // One that has just ended needs no signal.
        corral_sys::process::kill(pid, libc::SIGKILL).unwrap_or(());
        link.peer_gone().await;
    }
}

/// Starts a keeper that listens at `socket`, and waits until it does. It goes on when this process ends.
///
/// # Errors
/// When it cannot be started; its own words are in the file beside the socket, with the ending `.log`.
pub async fn start(programs: &Programs, socket: &Path) -> Result<tokio::process::Child, RuntimeError> {
    const READY_WITHIN: Duration = Duration::from_secs(10);
    let log_path = socket.with_extension("log");
    if socket.exists() {
        std::fs::remove_file(socket).map_err(|e| RuntimeError::host("remove", socket, e))?;
    }
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&log_path)
        .map_err(|e| RuntimeError::host("open", &log_path, e))?;
    let mut child = tokio::process::Command::new(&programs.keeper)
        .arg(socket)
        .arg(&programs.init)
        .arg(&programs.guest)
        .arg(&programs.build)
        .current_dir("/")
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .kill_on_drop(false)
        .spawn()
        .map_err(|e| RuntimeError::host("start", &programs.keeper, e))?;
    let started = tokio::time::Instant::now();
    while started.elapsed() < READY_WITHIN {
        if socket.exists() {
            return Ok(child);
        }
        if let Ok(Some(status)) = child.try_wait() {
            let words = std::fs::read_to_string(&log_path).unwrap_or_default();
            let last = words.lines().last().unwrap_or("it said nothing").to_owned();
            return Err(RuntimeError::Unsupported(format!("the keeper ended with {status}: {last}")));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    child.start_kill().unwrap_or(());
    Err(RuntimeError::Unsupported("the keeper did not begin to listen".into()))
}
