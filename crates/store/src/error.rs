//! What can go wrong with a store, and what a caller may do about it.

use rustix::io::Errno;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// What kind of failure a [`StoreError`] is: all that code decides by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// There is no such object.
    NotFound,
    /// The call did not end within its deadline. A write may have happened.
    Timeout,
    /// The store cannot be reached, is overloaded or fails. A write may have happened.
    Unavailable,
    /// The store refuses these credentials, or this process the access.
    Denied,
    /// The answer is not what was asked for: cut short, of another length, or not understood.
    Corrupt,
    /// The key, the configuration or the argument is wrong: no attempt can succeed.
    Invalid,
    /// The store has no space left, or the quota is used up.
    Full,
    /// The store lacks something that is needed.
    Unsupported,
}

impl ErrorKind {
    /// Whether the same call may succeed later, with nothing changed.
    ///
    /// A cut answer is among these: the object may be sound and the connection bad.
    #[must_use]
    pub fn is_retryable(self) -> bool {
        matches!(self, Self::Timeout | Self::Unavailable | Self::Corrupt)
    }
}

/// What is wrong with a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyFault {
    /// It has no characters.
    #[error("it is empty")]
    Empty,
    /// It is longer than a key may be.
    #[error("it is longer than {} bytes", crate::MAX_KEY_BYTES)]
    Long,
    /// It has more segments than a key may have.
    #[error("it has more than {} segments", crate::MAX_SEGMENTS)]
    Deep,
    /// A segment is empty: a slash at either end, or two in a row.
    #[error("it has an empty segment")]
    EmptySegment,
    /// A segment is longer than a segment may be.
    #[error("it has a segment longer than {} bytes", crate::MAX_SEGMENT_BYTES)]
    LongSegment,
    /// A segment begins with something else than a lower-case letter or a digit.
    #[error("a segment begins with neither a lower-case letter nor a digit")]
    Start,
    /// It has a character other than `a-z 0-9 . _ - /`.
    #[error("it has a character other than a-z, 0-9, '.', '_', '-' and '/'")]
    Character,
}

/// Why a call on a store failed. The text names no secrets.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A key that no store takes.
    #[error("invalid key {key:?}: {fault}")]
    InvalidKey {
        /// The key, cut where it is long.
        key: String,
        /// What is wrong with it.
        fault: KeyFault,
    },
    /// A range or length that no store takes.
    #[error("cannot read {key}: {what}")]
    InvalidRange {
        /// The object.
        key: String,
        /// What is wrong.
        what: String,
    },
    /// A configuration that makes no store, or names one that is not there.
    #[error("store configuration: {what}")]
    InvalidConfig {
        /// What is wrong, and what would be right.
        what: String,
    },
    /// There is no such object.
    #[error("{key} is not in the store")]
    NotFound {
        /// The object.
        key: String,
    },
    /// Fewer or more bytes came than were asked for.
    #[error("wrong length of {key}: {expected} bytes expected, {got} came")]
    WrongLength {
        /// The object.
        key: String,
        /// Bytes asked for.
        expected: u64,
        /// Bytes that came, as far as they were counted.
        got: u64,
    },
    /// The object ends before the range does.
    #[error("{key} ends before byte {end}")]
    PastEnd {
        /// The object.
        key: String,
        /// Where the range that was asked for ends.
        end: u64,
    },
    /// The object is larger than the caller takes.
    #[error("{key} has {size} bytes: at most {max} are taken")]
    TooLong {
        /// The object.
        key: String,
        /// Its size.
        size: u64,
        /// What the caller takes.
        max: u64,
    },
    /// The call did not end in time.
    #[error("{op} {key}: no end after {} ms", after.as_millis())]
    Timeout {
        /// What was tried.
        op: &'static str,
        /// The object.
        key: String,
        /// How long was waited.
        after: Duration,
    },
    /// A call on a directory store failed.
    #[error("{op} {key}")]
    Io {
        /// What was tried.
        op: &'static str,
        /// The object, or the directory.
        key: String,
        /// Why it failed.
        source: io::Error,
    },
    /// A file that was to be put cannot be read, or changed meanwhile.
    #[error("reading {}", path.display())]
    Source {
        /// The local file.
        path: PathBuf,
        /// Why it cannot be read.
        source: io::Error,
    },
    /// A service answered with an error, or not at all.
    #[error("{op} {key}: {text}")]
    Service {
        /// What was tried.
        op: &'static str,
        /// The object, or the bucket.
        key: String,
        /// What it comes to.
        kind: ErrorKind,
        /// The status of the answer, where there was one.
        status: Option<u16>,
        /// Status, code and message of the service, or what happened to the connection.
        text: String,
    },
    /// The store lacks something that is needed.
    #[error("the store cannot be used: {what}")]
    Unsupported {
        /// What it lacks.
        what: String,
    },
    /// The call was given up: its caller went, or the process ends.
    #[error("{op} {key}: given up")]
    Stopped {
        /// What was tried.
        op: &'static str,
        /// The object.
        key: String,
    },
    /// A failure that [`Faulty`](crate::Faulty) was told to make.
    #[error("{op} {key}: injected failure ({kind:?})")]
    Injected {
        /// What was tried.
        op: &'static str,
        /// The object.
        key: String,
        /// The kind asked for.
        kind: ErrorKind,
    },
}

impl StoreError {
    /// What kind of failure this is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::InvalidKey { .. } | Self::InvalidRange { .. } | Self::InvalidConfig { .. } | Self::Source { .. } => {
                ErrorKind::Invalid
            }
            Self::NotFound { .. } => ErrorKind::NotFound,
            Self::WrongLength { .. } | Self::PastEnd { .. } | Self::TooLong { .. } => ErrorKind::Corrupt,
            Self::Timeout { .. } => ErrorKind::Timeout,
            Self::Io { source, .. } => kind_of_io(source),
            Self::Service { kind, .. } | Self::Injected { kind, .. } => *kind,
            Self::Unsupported { .. } => ErrorKind::Unsupported,
            Self::Stopped { .. } => ErrorKind::Unavailable,
        }
    }

    /// Whether the same call may succeed later, with nothing changed.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        // Objects are whole from the start: one that is too short or too long stays so.
        !matches!(self, Self::PastEnd { .. } | Self::TooLong { .. }) && self.kind().is_retryable()
    }

    pub(crate) fn config(what: impl Into<String>) -> Self {
        Self::InvalidConfig { what: what.into() }
    }

    pub(crate) fn io(op: &'static str, key: impl Into<String>, source: impl Into<io::Error>) -> Self {
        let (key, source) = (key.into(), source.into());
        if Errno::from_io_error(&source) == Some(Errno::NOENT) {
            return Self::NotFound { key };
        }
        Self::Io { op, key, source }
    }
}

/// Errors of file systems that lie across a network are of the store, not of the call: those are worth another try.
fn kind_of_io(error: &io::Error) -> ErrorKind {
    match Errno::from_io_error(error) {
        Some(Errno::NOENT) => ErrorKind::NotFound,
        Some(Errno::ACCESS | Errno::PERM | Errno::ROFS) => ErrorKind::Denied,
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => ErrorKind::Full,
        Some(
            Errno::NOTDIR | Errno::ISDIR | Errno::NAMETOOLONG | Errno::LOOP | Errno::XDEV | Errno::EXIST | Errno::INVAL,
        ) => ErrorKind::Invalid,
        Some(Errno::NOSYS | Errno::OPNOTSUPP) => ErrorKind::Unsupported,
        Some(Errno::TIMEDOUT) => ErrorKind::Timeout,
        _ => ErrorKind::Unavailable,
    }
}
