//! Making way for another version of this program: it is executed in this process, with all descriptors.

use super::Server;
use crate::protocol::{Reply, Step};
use crate::saved::{self, Saved};
use crate::table::Owner;
use corral_sys::process;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use std::convert::Infallible;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

impl Server {
    /// Executes the keeper in the first descriptor, with the first process's program and the worker's in the others.
    /// Its children stay its children. Returns only when that fails, with the answer for the node.
    pub(super) fn replace(&mut self, build: &str, fds: &[OwnedFd]) -> Reply {
        let [program, init, guest] = fds else {
            return Reply::Failed { step: Step::Request, errno: Errno::BADF.raw_os_error() };
        };
        self.reap();
        if self.is_starting() {
            return Reply::Refused { reason: "something is starting".into() };
        }
        let Err(error) = self.execute(program, init, guest, build);
        // What cannot be set back closes in every child nevertheless.
        self.set_inheritable(false).unwrap_or(());
        Reply::Failed { step: Step::Exec, errno: error.raw_os_error() }
    }

    /// Whether a sandbox, a command or a sandbox's terminals are between their beginning and their first report.
    fn is_starting(&self) -> bool {
        self.table.sandboxes.iter().any(|(_, s)| s.starting.is_some())
            || self.table.commands.iter().any(|(_, c)| c.starting.is_some() || c.waiting_log.is_some())
            || self.table.by_pid.values().any(|owner| matches!(owner, Owner::TerminalsOf(_)))
    }

    fn execute(&self, program: &OwnedFd, init: &OwnedFd, guest: &OwnedFd, build: &str) -> Result<Infallible, Errno> {
        let saved = Saved::of(&self.listener, &self.table, self.kit.terminals.as_ref());
        let text = serde_json::to_vec(&saved).map_err(|_| Errno::INVAL)?;
        let state = memfd_create("state", MemfdFlags::empty())?;
        let mut rest = text.as_slice();
        while !rest.is_empty() {
            rest = &rest[rustix::io::write(&state, rest)?..];
        }
        self.set_inheritable(true)?;
        for fd in [init, guest] {
            fcntl_setfd(fd, FdFlags::empty())?;
        }
        let number = |fd: &OwnedFd| fd.as_raw_fd().to_string();
        // Under the same name, and with the socket still told, for whoever looks at the processes.
        let mut argv: Vec<String> = std::env::args().take(2).collect();
        argv.extend(["--resume".to_owned(), number(&state), number(init), number(guest), build.to_owned()]);
        let argv = argv.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>();
        let argv = argv.map_err(|_| Errno::INVAL)?;
        Err(process::exec_fd(program.as_fd(), &argv, &[]))
    }

    fn set_inheritable(&self, inheritable: bool) -> Result<(), Errno> {
        saved::set_inheritable(&self.listener, &self.table, self.kit.terminals.as_ref(), inheritable)
    }
}
