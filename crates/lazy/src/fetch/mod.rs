//! Chunks from the store: asked for once, checked against the manifest, and only then written, marked and answered.
//!
//! [`ensure`] is what a reader waits for. What is missing is claimed ([`crate::layer::flights`]), chunks that lie
//! behind each other in a pack become one read ([`runs`]), which takes its part of the [`budget`], goes to the store
//! ([`source`]) and is unpacked and checked in [`bring`]. [`prefetch`] brings what nobody waits for yet.

mod bring;
pub(crate) mod budget;
pub(crate) mod prefetch;
mod runs;
pub(crate) mod source;

use crate::layer::Layer;
use crate::layer::flights::{Flights, Plan};
use crate::server::Core;
use budget::Lane;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// How much longer a reader waits than whoever brings its chunk, so that it learns why that failed.
const GRACE: Duration = Duration::from_millis(500);

/// Why a chunk is not here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FetchError {
    /// The store gave other bytes than the manifest says, each time.
    #[error("chunk {chunk} came wrong {tries} times")]
    Corrupt { chunk: usize, tries: u32 },
    /// The store gave nothing, for as long as a reader may wait.
    #[error("chunk {chunk} did not come in time: {why}")]
    Late { chunk: usize, why: String },
    /// The store says that there is no such thing.
    #[error("the store does not give chunk {chunk}: {why}")]
    Refused { chunk: usize, why: String },
    /// It cannot be written here.
    #[error("chunk {chunk} cannot be kept: {why}")]
    Disk { chunk: usize, why: String },
    /// Whoever brought it stopped.
    #[error("chunk {chunk} was given up")]
    GivenUp { chunk: usize },
}

impl FetchError {
    /// Whether it is of no use to try again now.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Corrupt { .. } | Self::Refused { .. } | Self::Disk { .. })
    }

    /// Which chunk.
    pub fn chunk(&self) -> usize {
        match self {
            Self::Corrupt { chunk, .. }
            | Self::Late { chunk, .. }
            | Self::Refused { chunk, .. }
            | Self::Disk { chunk, .. }
            | Self::GivenUp { chunk } => *chunk,
        }
    }
}

/// For whom chunks are brought.
#[derive(Debug, Clone)]
pub(crate) struct Want {
    /// What goes before what.
    pub lane: Lane,
    /// Until when to try.
    pub deadline: Instant,
    /// The reading thread, or 0.
    pub pid: u32,
    /// The reader's cgroup, where there is a reader.
    pub cgroup: Option<Arc<str>>,
}

/// Whether a failure is news, or what was found a moment ago.
pub(crate) struct Failure {
    pub error: Arc<FetchError>,
    pub is_new: bool,
}

pub(crate) use bring::pass_through;

/// Waits until these chunks are here. May be dropped; what was claimed is brought nevertheless.
///
/// # Errors
/// One of them does not come.
pub(crate) async fn ensure(
    core: &Arc<Core>,
    layer: &Arc<Layer>,
    chunks: Range<usize>,
    want: &Want,
) -> Result<(), Failure> {
    loop {
        let known = |error| Failure { error, is_new: false };
        let Plan { claims, flights } = Flights::plan(layer, chunks.clone(), want.pid).map_err(known)?;
        if flights.is_empty() {
            return Ok(());
        }
        if !claims.is_empty() {
            tokio::spawn(bring::bring(Arc::clone(core), Arc::clone(layer), claims, want.clone()));
        }
        let mut failed = None;
        for flight in flights {
            // A little later than whoever brings it, so that the reason is known.
            let late = want.deadline + GRACE;
            match timeout_at(late, flight.wait()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => failed = Some(error),
                Err(_) => {
                    let why = "another reader's request is under way".to_owned();
                    failed = Some(Arc::new(FetchError::Late { chunk: chunks.start, why }));
                }
            }
        }
        match failed {
            None => return Ok(()),
            // It was tried for someone who waits less long, or was given up: this reader tries itself.
            Some(error) if !error.is_final() && Instant::now() < want.deadline => {
                tracing::debug!(layer = %layer.id, %error, "trying again");
            }
            Some(error) => return Err(Failure { error, is_new: true }),
        }
    }
}
