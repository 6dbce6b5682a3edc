//! Chunks that are being brought: each by one claimant, however many wait for it.

use super::Layer;
use super::map::State;
use crate::fetch::FetchError;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// How long a failure answers for those who ask next: the kernel asks for the pages of a failed read one by one.
const REMEMBERED: Duration = Duration::from_secs(1);

type Outcome = Result<(), Arc<FetchError>>;

/// One chunk on its way.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    outcome: OnceLock<Outcome>,
    landed: Notify,
}

impl Flight {
    /// Waits for its end.
    pub async fn wait(&self) -> Outcome {
        loop {
            let landed = self.landed.notified();
            if let Some(outcome) = self.outcome.get() {
                return outcome.clone();
            }
            landed.await;
        }
    }
}

/// All chunks of a layer that are on their way.
#[derive(Debug, Default)]
pub(crate) struct Flights(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    flying: HashMap<usize, Arc<Flight>>,
    failed: HashMap<usize, Failed>,
}

/// What is remembered of a failure.
#[derive(Debug)]
struct Failed {
    at: Instant,
    error: Arc<FetchError>,
    /// Who waited.
    pid: u32,
}

impl Failed {
    /// Whether it answers for this reader: one that has not waited yet may have more luck with the store.
    fn is_for(&self, pid: u32) -> bool {
        self.at.elapsed() < REMEMBERED && (self.error.is_final() || self.pid == pid)
    }
}

/// The duty to bring one chunk. Dropped without an outcome, it is given up, and others may claim it.
#[derive(Debug)]
pub(crate) struct Claim {
    layer: Arc<Layer>,
    pub chunk: usize,
    flight: Arc<Flight>,
    settled: bool,
}

/// What it takes to have some chunks.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// To be brought by whoever planned.
    pub claims: Vec<Claim>,
    /// To be waited for, these included.
    pub flights: Vec<Arc<Flight>>,
}

impl Flights {
    /// Claims what is missing and not under way.
    ///
    /// # Errors
    /// One of the chunks failed a moment ago.
    pub fn plan(layer: &Arc<Layer>, chunks: impl Iterator<Item = usize>, pid: u32) -> Result<Plan, Arc<FetchError>> {
        let mut plan = Plan::default();
        let mut table = layer.flights.table();
        for chunk in chunks {
            if layer.map.state(chunk) == State::Present {
                continue;
            }
            if let Some(flight) = table.flying.get(&chunk) {
                plan.flights.push(Arc::clone(flight));
                continue;
            }
            if let Some(failed) = table.failed.get(&chunk).filter(|failed| failed.is_for(pid)) {
                let error = Arc::clone(&failed.error);
                // A claim takes the lock when it is given up.
                drop(table);
                return Err(error);
            }
            let claim = table.claim(layer, chunk);
            plan.flights.push(Arc::clone(&claim.flight));
            plan.claims.push(claim);
        }
        Ok(plan)
    }

    /// Claims those of some chunks that are missing and not under way, if they did not fail a moment ago.
    pub fn claim_free(layer: &Arc<Layer>, chunks: &[usize]) -> Vec<Claim> {
        let mut table = layer.flights.table();
        let mut claims = Vec::new();
        for chunk in chunks {
            if !table.knows(*chunk) && layer.map.state(*chunk) != State::Present {
                claims.push(table.claim(layer, *chunk));
            }
        }
        claims
    }

    /// Claims chunks that are not here and that nobody brings, up to the first of which this is not so.
    pub fn claim_next(layer: &Arc<Layer>, chunks: impl Iterator<Item = usize>) -> Vec<Claim> {
        let mut table = layer.flights.table();
        let mut claims = Vec::new();
        for chunk in chunks {
            if table.knows(chunk) || layer.map.state(chunk) != State::Absent {
                break;
            }
            claims.push(table.claim(layer, chunk));
        }
        claims
    }

    /// How many chunks are under way.
    pub fn count(&self) -> usize {
        self.table().flying.len()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Whether somebody brings a chunk, or failed to a moment ago.
    fn knows(&self, chunk: usize) -> bool {
        self.flying.contains_key(&chunk) || self.failed.contains_key(&chunk)
    }

    fn claim(&mut self, layer: &Arc<Layer>, chunk: usize) -> Claim {
        let flight = Arc::<Flight>::default();
        self.flying.insert(chunk, Arc::clone(&flight));
        Claim { layer: Arc::clone(layer), chunk, flight, settled: false }
    }
}

impl Claim {
    /// The chunk is here.
    pub fn land(mut self) {
        self.settle(Ok(()), None);
    }

    /// The chunk will not come. For a moment this answers for the reader that waited, and where it is of no use to try
    /// again, for others.
    pub fn fail(mut self, error: FetchError, remember: Option<u32>) {
        self.settle(Err(Arc::new(error)), remember);
    }

    fn settle(&mut self, outcome: Outcome, remember: Option<u32>) {
        self.settled = true;
        let mut table = self.layer.flights.table();
        table.flying.remove(&self.chunk);
        match &outcome {
            // The store answers again.
            Ok(()) => table.failed.retain(|_, failed| failed.error.is_final()),
            Err(error) => {
                table.failed.retain(|_, failed| failed.at.elapsed() < REMEMBERED);
                if let Some(pid) = remember {
                    let failed = Failed { at: Instant::now(), error: Arc::clone(error), pid };
                    table.failed.insert(self.chunk, failed);
                }
            }
        }
        drop(table);
        // Nobody but this claim sets it.
        self.flight.outcome.get_or_init(|| outcome);
        self.flight.landed.notify_waiters();
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.settled {
            let error = FetchError::GivenUp { chunk: self.chunk };
            self.settle(Err(Arc::new(error)), None);
        }
    }
}
