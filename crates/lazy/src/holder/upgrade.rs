//! Going on as another version: looked at first, since there is no way back.

use super::Holder;
use super::watch::ANSWER;
use crate::HANDOVER;
use crate::options::{Options, OptionsError};
use crate::server::own_path;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::net::{RecvFlags, SendFlags};
use std::convert::Infallible;
use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a program may take to say what it is.
const PROBE: Duration = Duration::from_secs(5);

/// What `corral-lazy probe` prints, when it is told what a holder is told.
///
/// # Errors
/// It does not understand that.
pub fn probe_line(words: &[String]) -> Result<&'static str, OptionsError> {
    Options::parse(words).map(|_| HANDOVER)
}

impl Holder {
    /// A word of the server.
    pub(super) fn hear(&mut self) {
        let mut message = [0; 8192];
        let Some(child) = &self.child else { return };
        let Ok((length, _)) = rustix::net::recv(&child.link, &mut message[..], RecvFlags::DONTWAIT) else { return };
        if length == 0 {
            // It ends; the signal says so.
            std::thread::sleep(Duration::from_millis(1));
            return;
        }
        if message[..length] == *ANSWER {
            self.watch.answered();
        } else if let Some(path) = message[..length].strip_prefix(b"upgrade ") {
            let path = PathBuf::from(OsStr::from_bytes(path));
            let Err(why) = self.upgrade(Some(path));
            eprintln!("corral-lazy: staying as it is: {why}");
            self.tell(format!("no {why}").as_bytes());
        }
    }

    /// Goes on as the program at a path, or at the one it was started from. Returns only when that is not possible.
    pub(super) fn upgrade(&mut self, path: Option<PathBuf>) -> Result<Infallible, String> {
        let is_asked = path.is_some();
        let path = path.or_else(|| self.options.program.clone()).or_else(own_path).ok_or("no program is named")?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let program = rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| format!("{}: {e}", path.display()))?;
        probe(&path, &self.options.words())?;
        if is_asked {
            self.tell(b"ok");
            self.wait_for_go();
        }
        self.become_program(&program, path)
    }

    pub(super) fn tell(&self, message: &[u8]) {
        if let Some(child) = &self.child {
            // A server that ended meanwhile has nobody to tell either.
            rustix::net::send(&child.link, message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).unwrap_or(0);
        }
    }

    /// Lets the server tell its client before it is ended.
    fn wait_for_go(&self) {
        const LONGEST: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
        let Some(child) = &self.child else { return };
        let mut word = [0; 64];
        // It may answer what it was asked before.
        while poll(&mut [PollFd::new(&child.link, PollFlags::IN)], Some(&LONGEST)) == Ok(1) {
            match rustix::net::recv(&child.link, &mut word[..], RecvFlags::DONTWAIT) {
                Ok((length, _)) if word[..length] == *ANSWER => {}
                _ => return,
            }
        }
    }
}

/// Whether a program is one that can take over, and understands what it will be told.
fn probe(path: &Path, words: &[String]) -> Result<(), String> {
    let fault = |what: String| format!("{}: {what}", path.display());
    let mut command = Command::new(path);
    command.arg("probe").args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|e| fault(e.to_string()))?;
    let until = Instant::now() + PROBE;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
            Ok(None) => {
                child.kill().and_then(|()| child.wait()).map_err(|e| fault(e.to_string()))?;
                return Err(fault("it does not say what it is".to_owned()));
            }
            Err(error) => return Err(fault(error.to_string())),
        }
    };
    let mut said = String::new();
    let out = child.stdout.take().map(|out| out.take(4096).read_to_string(&mut said));
    match out {
        Some(Ok(_)) if status.success() && said.trim() == HANDOVER => Ok(()),
        _ => Err(fault(format!("it is not a program that says {HANDOVER:?}"))),
    }
}
