//! Starting a process in a live sandbox: a helper joins its cgroups and namespaces and forks the process, which
//! becomes the keeper's own child, is confined and executes its program.

use crate::confine;
use crate::kit::Kit;
use crate::launch::IDS_PER_SANDBOX;
use crate::protocol::{Io, Program, Spawn, Step};
use crate::wire;
use corral_sys::fork::{clone_child, flags};
use corral_sys::{identity, process};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::thread::ThreadNameSpaceType;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Number of the control pipe in a process that has one.
pub const CONTROL_FD: i32 = 9;
/// Number of a worker's socket.
pub const WORKER_FD: i32 = 3;

/// A process that was made; its socket reports a failure, hands over a terminal, or closes when the program runs.
#[derive(Debug)]
pub struct Spawned {
    /// The helper that makes it; the socket tells the process's own id.
    pub helper: i32,
    /// Socket to both.
    pub socket: OwnedFd,
    /// Sources of output with their logs, by stream: standard output, standard error, control. A terminal's source
    /// comes over the socket.
    pub sources: [Option<OwnedFd>; 3],
    /// Logs in the same order.
    pub logs: [Option<OwnedFd>; 3],
    /// Write end of standard input.
    pub stdin: Option<OwnedFd>,
}

/// What the process's standard streams are made of.
struct Streams {
    stdin: Option<OwnedFd>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    control: Option<OwnedFd>,
    worker: Option<OwnedFd>,
    terminal: Option<(u16, u16)>,
}

/// Starts a process in the sandbox whose first process is `init`.
///
/// # Errors
/// The step that failed before the process existed.
pub fn spawn(
    kit: &Kit,
    spawn: &Spawn,
    program: &Program,
    init: i32,
    fds: Vec<OwnedFd>,
) -> Result<Spawned, (Step, Errno)> {
    let bad = (Step::Request, Errno::BADF);
    let mut fds = fds.into_iter();
    let cgroups: Vec<OwnedFd> = fds.by_ref().take(spawn.cgroups.into()).collect();
    if cgroups.len() != usize::from(spawn.cgroups) {
        return Err(bad);
    }
    let unified = if spawn.unified { Some(fds.next().ok_or(bad)?) } else { None };
    let streams_error = |e| (Step::Streams, e);
    // The user's own, so that /dev/stdout and the like can be opened.
    let owner = |id: u32| spawn.id_base.saturating_add(id.min(IDS_PER_SANDBOX - 1));
    let output = || {
        identity::set_filesystem(owner(spawn.uid), owner(spawn.gid));
        let made = pipe_with(PipeFlags::CLOEXEC).map_err(streams_error);
        identity::set_filesystem(0, 0);
        made
    };
    let mut spawned_sources = [None, None, None];
    let mut logs = [None, None, None];
    let mut input = None;
    let mut streams = Streams { stdin: None, stdout: None, stderr: None, control: None, worker: None, terminal: None };
    match &spawn.io {
        Io::Pipes { stdin, merge, control, .. } => {
            let mut add = |stream: usize| -> Result<OwnedFd, (Step, Errno)> {
                let (read, write) = output()?;
                rustix::io::ioctl_fionbio(&read, true).map_err(streams_error)?;
                logs[stream] = Some(fds.next().ok_or(bad)?);
                spawned_sources[stream] = Some(read);
                Ok(write)
            };
            streams.stdout = Some(add(0)?);
            if !merge {
                streams.stderr = Some(add(1)?);
            }
            if *control {
                streams.control = Some(add(2)?);
            }
            if *stdin {
                let (read, write) = output()?;
                streams.stdin = Some(read);
                input = Some(write);
            }
        }
        Io::Terminal { cols, rows, .. } => {
            logs[0] = Some(fds.next().ok_or(bad)?);
            streams.terminal = Some((*cols, *rows));
        }
        Io::Worker => streams.worker = Some(fds.next().ok_or(bad)?),
    }
    let target = rustix::process::Pid::from_raw(init).ok_or((Step::Join, Errno::SRCH))?;
    let target =
        rustix::process::pidfd_open(target, rustix::process::PidfdFlags::empty()).map_err(|e| (Step::Join, e))?;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|e| (Step::Request, e))?;
    let child = Child { kit, spawn, program, streams: &streams, socket: theirs.as_fd() };
    let helper = clone_child(kit.single, 0, unified.as_ref().map(AsFd::as_fd), || child.help(&cgroups, target.as_fd()))
        .map_err(|e| (Step::Clone, e))?;
    drop(theirs);
    // The helper enters the sandbox's cgroups, where it may be throttled: nobody waits for it here.
    rustix::io::ioctl_fionbio(&ours, true).map_err(|e| (Step::Request, e))?;
    Ok(Spawned { helper, socket: ours, sources: spawned_sources, logs, stdin: input })
}

struct Child<'a> {
    kit: &'a Kit,
    spawn: &'a Spawn,
    program: &'a Program,
    streams: &'a Streams,
    socket: BorrowedFd<'a>,
}

impl Child<'_> {
    fn report(&self, (step, errno): (Step, Errno)) -> i32 {
        // The keeper sees the exit in any case.
        wire::send(self.socket, &[b'E', step as u8, errno.raw_os_error() as u8], &[]).unwrap_or(());
        1
    }

    /// The helper: joins and forks.
    fn help(&self, cgroups: &[OwnedFd], target: BorrowedFd<'_>) -> i32 {
        match self.join(cgroups, target) {
            Ok(pid) => {
                let mut message = vec![b'P'];
                message.extend(pid.to_le_bytes());
                match wire::send(self.socket, &message, &[]) {
                    Ok(()) => 0,
                    Err(_) => 1,
                }
            }
            Err(failure) => self.report(failure),
        }
    }

    fn join(&self, cgroups: &[OwnedFd], target: BorrowedFd<'_>) -> Result<i32, (Step, Errno)> {
        let mut keep: Vec<i32> = cgroups.iter().map(AsRawFd::as_raw_fd).collect();
        keep.extend([
            self.socket.as_raw_fd(),
            target.as_raw_fd(),
            self.kit.guest.as_raw_fd(),
            self.kit.null.as_raw_fd(),
        ]);
        let s = self.streams;
        for fd in [&s.stdin, &s.stdout, &s.stderr, &s.control, &s.worker].into_iter().flatten() {
            keep.push(fd.as_raw_fd());
        }
        process::close_all_but(&keep).map_err(|e| (Step::Request, e))?;
        for procs in cgroups {
            rustix::io::write(procs, b"0").map_err(|e| (Step::Cgroup, e))?;
        }
        let mut spaces = ThreadNameSpaceType::USER
            | ThreadNameSpaceType::MOUNT
            | ThreadNameSpaceType::NETWORK
            | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION
            | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
            | ThreadNameSpaceType::CONTROL_GROUP;
        // A worker stays out of sight of the processes inside.
        if self.spawn.io != Io::Worker {
            spaces |= ThreadNameSpaceType::PROCESS_ID;
        }
        rustix::thread::move_into_thread_name_spaces(target, spaces).map_err(|e| (Step::Join, e))?;
        clone_child(self.kit.single, flags::PARENT, None, || match self.become_program() {
            Ok(never) => match never {},
            Err(failure) => self.report(failure),
        })
        .map_err(|e| (Step::Clone, e))
    }

    fn become_program(&self) -> Result<std::convert::Infallible, (Step, Errno)> {
        let streams_error = |e| (Step::Streams, e);
        identity::set_all(0, 0).map_err(|e| (Step::Identity, e))?;
        rustix::process::setsid().map_err(streams_error)?;
        process::set_limit(process::LIMIT_NOFILE, self.spawn.open_files.into()).map_err(|e| (Step::Limits, e))?;
        process::set_limit(process::LIMIT_CORE, 0).map_err(|e| (Step::Limits, e))?;
        confine::set_affinity(&self.spawn.affinity).map_err(|e| (Step::Limits, e))?;
        confine::become_user(
            &self.kit.filter,
            self.spawn.uid,
            self.spawn.gid,
            &self.spawn.groups,
            self.spawn.allow_setuid,
        )?;
        self.connect().map_err(streams_error)?;
        if !self.program.cwd.is_empty() {
            rustix::process::chdir(self.program.cwd.as_str()).map_err(|e| (Step::WorkingDirectory, e))?;
        }
        process::reset_signals().map_err(|e| (Step::Exec, e))?;
        let argv = c_strings(&self.program.argv)?;
        let env = c_strings(&self.program.env)?;
        if self.spawn.io == Io::Worker {
            return Err((Step::Exec, process::exec_fd(self.kit.guest.as_fd(), &argv, &env)));
        }
        Err((Step::Exec, exec_in_path(&argv, &env, &self.program.env)))
    }

    fn connect(&self) -> Result<(), Errno> {
        let s = self.streams;
        let null = self.kit.null.as_fd();
        if let Some((cols, rows)) = s.terminal {
            return self.open_terminal(cols, rows);
        }
        let stdout = s.stdout.as_ref().map_or(null, AsFd::as_fd);
        // Descriptors above 2 close at exec; the ones placed here stay.
        if let Some(worker) = &s.worker {
            process::place_fd(worker.as_fd(), WORKER_FD)?;
        }
        if let Some(control) = &s.control {
            process::place_fd(control.as_fd(), CONTROL_FD)?;
        }
        process::place_fd(s.stdin.as_ref().map_or(null, AsFd::as_fd), 0)?;
        process::place_fd(stdout, 1)?;
        process::place_fd(s.stderr.as_ref().map_or(stdout, AsFd::as_fd), 2)
    }

    fn open_terminal(&self, cols: u16, rows: u16) -> Result<(), Errno> {
        let flags =
            rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY | rustix::pty::OpenptFlags::CLOEXEC;
        let raw = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let master = rustix::fs::openat(CWD, "/dev/ptmx", raw, Mode::empty())?;
        rustix::pty::unlockpt(&master)?;
        let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
        let size = rustix::termios::Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&slave, size)?;
        rustix::process::ioctl_tiocsctty(&slave)?;
        wire::send(self.socket, b"T", &[master.as_fd()])?;
        for number in 0..3 {
            process::place_fd(slave.as_fd(), number)?;
        }
        Ok(())
    }
}

fn c_strings(list: &[String]) -> Result<Vec<CString>, (Step, Errno)> {
    list.iter().map(|s| CString::new(s.as_str()).map_err(|_| (Step::Exec, Errno::INVAL))).collect()
}

/// Executes as execvpe(3) does: a name without a slash is looked up in the `PATH` of its own environment.
fn exec_in_path(argv: &[CString], env: &[CString], env_text: &[String]) -> Errno {
    let Some(name) = argv.first() else { return Errno::INVAL };
    if name.to_bytes().contains(&b'/') {
        return process::exec(name, argv, env);
    }
    let path = env_text.iter().find_map(|e| e.strip_prefix("PATH=")).unwrap_or("/usr/local/bin:/usr/bin:/bin");
    let mut worst = Errno::NOENT;
    for dir in path.split(':') {
        let dir = if dir.is_empty() { "." } else { dir };
        let Ok(candidate) = CString::new([dir.as_bytes(), b"/", name.to_bytes()].concat()) else { continue };
        match process::exec(&candidate, argv, env) {
            Errno::NOENT | Errno::NOTDIR => {}
            Errno::ACCESS => worst = Errno::ACCESS,
            other => return other,
        }
    }
    worst
}
