//! From the failures of the parts to what callers are told. The operator's log gets the whole chain, callers a text
//! without paths of the host.

use corral_api::problem::{ErrorKind, Problem};
use corral_layers::{ImportError, MountError, StoreError};
use corral_runtime::RuntimeError;

/// An error with its sources, for the log.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// What a caller is told of a runtime's failure.
pub fn runtime_problem(error: &RuntimeError) -> Problem {
    let kind = error.kind();
    if kind.status() >= 500 && !matches!(kind, ErrorKind::DiskFull | ErrorKind::InsufficientStorage) {
        tracing::error!(error = %chain(error), "an operation failed");
    }
    let message = match error {
        RuntimeError::Host { action, source, .. } => {
            format!("the node could not {action} something it needs: {source}")
        }
        RuntimeError::Start { step, errno } => {
            let reason = std::io::Error::from_raw_os_error(*errno);
            match kind {
                ErrorKind::CommandNotStarted => format!("the command could not be started ({step:?}): {reason}"),
                ErrorKind::LimitExceeded => {
                    "the process was refused or killed before it ran: the sandbox's memory or process limit is reached"
                        .into()
                }
                _ => format!("starting failed at step {step:?}: {reason}"),
            }
        }
        other => other.to_string(),
    };
    let problem = Problem::new(kind, message);
    if kind.is_retryable() { problem.retry_after_ms(1000) } else { problem }
}

/// What a caller is told of an import or a build.
pub fn import_problem(error: &ImportError) -> Problem {
    let message = match error {
        ImportError::Io { op, source, .. } => format!("the node cannot {op} a file it needs: {source}"),
        ImportError::Unstorable { source, .. } => format!("the content cannot be stored as a layer: {source}"),
        ImportError::Store(store) | ImportError::Mount(MountError::Store(store)) => store_message(store),
        ImportError::Mount(MountError::Unsupported { .. }) => "the node cannot mount layers from files".into(),
        ImportError::Mount(MountError::Syscall { op, source, .. }) => {
            format!("the node cannot {op} a layer: {source}")
        }
        other => chain(other),
    };
    Problem::new(error.kind(), message)
}

/// What a caller is told of the layer store.
pub fn store_problem(error: &StoreError) -> Problem {
    Problem::new(error.kind(), store_message(error))
}

fn store_message(error: &StoreError) -> String {
    match error {
        StoreError::Io { op, source, .. } => format!("the node cannot {op} a file of its layers: {source}"),
        StoreError::Record { reason, .. } => format!("a record of the node's layers is malformed: {reason}"),
        StoreError::Locked(_) => "the node's layers are held by another process".into(),
        other => other.to_string(),
    }
}

/// A failure of the ledger.
pub fn ledger_problem(error: &crate::ledger::LedgerError) -> Problem {
    tracing::error!(error = %chain(error), "the ledger failed");
    Problem::new(ErrorKind::StorageError, "the node's ledger cannot be written or read")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_the_host_are_not_told() {
        let io = || std::io::Error::from_raw_os_error(libc::ENOSPC);
        let path = || std::path::PathBuf::from("/var/lib/secret");
        for error in [
            ImportError::Io { op: "make", path: path(), source: io() },
            ImportError::Store(StoreError::Io { op: "make", path: path(), source: io() }),
            ImportError::Mount(MountError::Syscall { op: "mount", path: path(), source: io() }),
            ImportError::Unstorable { path: path(), source: corral_format::erofs::TreeError::LinkTarget(0) },
        ] {
            let problem = import_problem(&error);
            assert_eq!(problem.kind, error.kind());
            assert!(!problem.message.contains("secret"), "{problem}");
        }
    }
}
