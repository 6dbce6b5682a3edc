//! Standard input, terminals and signals.

use super::Command;
use super::exec::sender;
use crate::error::runtime_problem;
use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::problem::{ErrorKind, Problem};
use corral_keeper::protocol::Request;
use corral_runtime::RuntimeError;
use corral_runtime::cgroup;
use std::os::fd::AsFd;
use tokio::io::AsyncWriteExt;

impl Core {
    /// Writes to a command's standard input or terminal; waits while its pipe is full.
    ///
    /// # Errors
    /// When its input is closed.
    pub async fn write_input(
        &self,
        sandbox: &Sandbox,
        command: &Command,
        bytes: &[u8],
        close: bool,
    ) -> Result<(), Problem> {
        let closed = || Problem::new(ErrorKind::Conflict, "the command's standard input is closed");
        let mut input = command.input.lock().await;
        if input.is_none() && command.is_running() {
            // After a restart of the node only the keeper has it.
            let link = self.link_of(sandbox)?;
            let request = Request::Input { command: command.id.clone() };
            let fd = link.ask(request).await.map_err(|e| runtime_problem(&e))?;
            *input = fd.and_then(|fd| sender(fd).ok());
        }
        let written = match input.as_mut() {
            Some(pipe) => pipe.write_all(bytes).await.map_err(|_| closed()),
            None => Err(closed()),
        };
        if close || written.is_err() {
            *input = None;
            let link = self.link_of(sandbox)?;
            match link.ask(Request::CloseInput { command: command.id.clone() }).await {
                Ok(_) | Err(RuntimeError::Gone) => {}
                Err(error) => return Err(runtime_problem(&error)),
            }
        }
        written
    }

    /// Gives a command's terminal another size.
    ///
    /// # Errors
    /// When it has no terminal, or has ended.
    pub async fn resize(&self, command: &Command, cols: u16, rows: u16) -> Result<(), Problem> {
        let input = command.input.lock().await;
        let terminal =
            input.as_ref().ok_or_else(|| Problem::new(ErrorKind::Conflict, "the command has no terminal any more"))?;
        let size = rustix::termios::Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(terminal.as_fd(), size)
            .map_err(|e| Problem::new(ErrorKind::Conflict, format!("the terminal cannot be resized: {e}")))
    }

    /// Sends a signal to a command's first process, or to everything it started. One that has ended takes none.
    ///
    /// # Errors
    /// An unknown signal, or a lost keeper.
    pub async fn signal(&self, sandbox: &Sandbox, command: &Command, name: &str, tree: bool) -> Result<(), Problem> {
        let number = number_of(name).ok_or_else(|| {
            Problem::new(ErrorKind::InvalidRequest, format!("no signal {name:?}: give a name such as SIGTERM"))
        })?;
        if tree && number == libc::SIGKILL {
            return self.containers.kill_command(&sandbox.id, &command.id).map_err(|e| runtime_problem(&e));
        }
        if tree {
            for pid in cgroup::processes(self.containers.cgroups(), sandbox.id.as_str(), command.id.as_str()) {
                // One that ended meanwhile needs no signal.
                corral_sys::process::kill(pid, number).unwrap_or(());
            }
            return Ok(());
        }
        match self.link_of(sandbox)?.ask(Request::Signal { command: command.id.clone(), signal: number }).await {
            Ok(_) | Err(RuntimeError::Gone | RuntimeError::Start { .. }) => Ok(()),
            Err(error) => Err(runtime_problem(&error)),
        }
    }
}

const NAMES: [(&str, i32); 31] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("STKFLT", 16),
    ("CHLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("XCPU", 24),
    ("XFSZ", 25),
    ("VTALRM", 26),
    ("PROF", 27),
    ("WINCH", 28),
    ("IO", 29),
    ("PWR", 30),
    ("SYS", 31),
];

/// Number of a signal by name, with or without `SIG`, or by number.
fn number_of(name: &str) -> Option<i32> {
    if let Ok(number) = name.parse::<i32>() {
        return (1..=64).contains(&number).then_some(number);
    }
    let upper = name.to_ascii_uppercase();
    let short = upper.strip_prefix("SIG").unwrap_or(&upper);
    NAMES.iter().find(|(n, _)| *n == short).map(|(_, number)| *number)
}

/// Name of a signal, such as `SIGKILL`; the number for the ones without.
pub fn name_of(number: i32) -> String {
    NAMES.iter().find(|(_, n)| *n == number).map_or_else(|| format!("SIG{number}"), |(name, _)| format!("SIG{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_by_name_and_number() {
        assert_eq!((number_of("SIGTERM"), number_of("int"), number_of("9")), (Some(15), Some(2), Some(9)));
        assert_eq!((number_of("0"), number_of("65"), number_of("SIGNONE"), number_of("")), (None, None, None, None));
        assert_eq!((name_of(9).as_str(), name_of(40).as_str()), ("SIGKILL", "SIG40"));
    }
}
