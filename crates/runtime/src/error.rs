//! What can go wrong with a sandbox.

use corral_api::problem::ErrorKind;
use corral_keeper::protocol::Step;
use rustix::io::Errno;
use std::path::PathBuf;

/// A failure of the runtime.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// A file or directory of the host.
    #[error("cannot {action} {path}")]
    Host {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// A start that failed in the keeper or in the process itself.
    #[error("starting failed at step {step:?}: {}", std::io::Error::from_raw_os_error(*errno))]
    Start {
        /// Which step.
        step: Step,
        /// Error number.
        errno: i32,
    },
    /// The keeper refused.
    #[error("the keeper refused: {0}")]
    Refused(String),
    /// The keeper holds no such sandbox or command.
    #[error("the sandbox or command is not there any more")]
    Gone,
    /// The connection to the keeper broke.
    #[error("the keeper was lost")]
    KeeperLost,
    /// Arguments and environment are too long.
    #[error("arguments and environment take {0} bytes: more than fits")]
    ProgramTooLong(usize),
    /// No such user.
    #[error("no user {0:?} in the sandbox")]
    UnknownUser(String),
    /// A file operation failed inside.
    #[error("{}", .0.message)]
    File(corral_guest::protocol::OpError),
    /// The worker for a file operation died or answered nonsense.
    #[error("the file worker ended before it had answered: {0}")]
    Worker(&'static str),
    /// The space for writable layers is used up on this host.
    #[error("no room for another writable layer: {0}")]
    NoRoom(String),
    /// The host cannot do it.
    #[error("not possible on this host: {0}")]
    Unsupported(String),
}

impl RuntimeError {
    /// A failure on a path of the host.
    pub fn host(action: &'static str, path: impl Into<PathBuf>, source: impl Into<std::io::Error>) -> Self {
        Self::Host { action, path: path.into(), source: source.into() }
    }

    /// What a caller of the API is told.
    pub fn kind(&self) -> ErrorKind {
        use corral_guest::protocol::OpErrorKind as Op;
        match self {
            Self::Host { source, .. } if source.raw_os_error() == Some(libc::ENOSPC) => ErrorKind::InsufficientStorage,
            Self::Host { .. } => ErrorKind::StorageError,
            Self::Start { step: Step::Exec | Step::WorkingDirectory, .. } => ErrorKind::CommandNotStarted,
            Self::Start { errno, .. } if *errno == libc::EDQUOT || *errno == libc::ENOSPC => ErrorKind::DiskFull,
            Self::Start { step: Step::Clone | Step::Died, errno }
                if [libc::EAGAIN, libc::ENOMEM, libc::ECHILD].contains(errno) =>
            {
                ErrorKind::LimitExceeded
            }
            Self::Start { .. } => ErrorKind::Internal,
            Self::Refused(_) | Self::KeeperLost => ErrorKind::Unavailable,
            Self::Gone => ErrorKind::NotFound,
            Self::ProgramTooLong(_) => ErrorKind::TooLarge,
            Self::UnknownUser(_) => ErrorKind::UnknownUser,
            Self::File(error) => match error.kind {
                Op::NotFound => ErrorKind::NotFound,
                Op::Exists => ErrorKind::Conflict,
                Op::Busy => ErrorKind::FileBusy,
                Op::Denied => ErrorKind::PermissionDenied,
                Op::WrongType => ErrorKind::WrongFileType,
                Op::DiskFull => ErrorKind::DiskFull,
                Op::NoRoom => ErrorKind::InsufficientStorage,
                Op::BadPath => ErrorKind::InvalidRequest,
                Op::BadArchive => ErrorKind::InvalidImage,
                Op::Limit => ErrorKind::LimitExceeded,
                Op::Failed => ErrorKind::StorageError,
            },
            Self::Worker(_) => ErrorKind::LimitExceeded,
            Self::NoRoom(_) => ErrorKind::InsufficientStorage,
            Self::Unsupported(_) => ErrorKind::Unsupported,
        }
    }

    /// The error number behind a start that failed.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Start { errno, .. } => Some(Errno::from_raw_os_error(*errno)),
            _ => None,
        }
    }
}
