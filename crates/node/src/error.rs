//! From the failures of the parts to what callers are told. The operator's log gets the whole chain, callers a text
//! without paths of the host.

use corral_api::problem::{ErrorKind, Problem};
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

/// A failure of the ledger.
pub fn ledger_problem(error: &crate::ledger::LedgerError) -> Problem {
    tracing::error!(error = %chain(error), "the ledger failed");
    Problem::new(ErrorKind::StorageError, "the node's ledger cannot be written or read")
}
