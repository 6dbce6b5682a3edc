//! A store that goes wrong as it is told: for tests and benches.
//!
//! [`Faulty`] stands before any store; the [`Faults`] it was made with steer it from outside while it is in use. What
//! it does depends on the seed and the order of calls alone. Cut answers go through the same check of length that the
//! backends make, so that callers meet what a real store would give them; damaged bytes do not, as only the caller can
//! know.

use crate::error::{ErrorKind, StoreError};
use crate::exact;
use crate::key::Key;
use crate::random::Rng;
use crate::store::{Body, ListStream, ObjectMeta, Put, Store};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What happens to one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// It fails with an error of this kind, and does nothing.
    Fail(ErrorKind),
    /// It takes this much longer.
    Delay(Duration),
    /// Its answer lacks bytes at the end. Calls that give no bytes are untouched.
    Truncate,
    /// One bit of its answer is wrong. Calls that give no bytes are untouched.
    Flip,
    /// It is done, but its caller is told `Timeout`.
    LoseAnswer,
}

/// What went through a [`Faulty`] since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls of all kinds; a listing is one.
    pub calls: u64,
    /// Calls that read bytes.
    pub gets: u64,
    /// Calls that wrote.
    pub puts: u64,
    /// Bytes given to callers, damaged ones too.
    pub read_bytes: u64,
    /// Bytes of successful puts from memory.
    pub written_bytes: u64,
    /// Faults made, delays aside.
    pub faults: u64,
}

#[derive(Debug)]
struct State {
    rng: Rng,
    latency: Duration,
    down: bool,
    fail: (f64, ErrorKind),
    truncate: f64,
    flip: f64,
    script: VecDeque<Fault>,
    counts: Counts,
}

/// The handle that steers a [`Faulty`]. Clones steer the same one.
#[derive(Debug, Clone)]
pub struct Faults(Arc<Mutex<State>>);

impl Faults {
    /// No faults yet. The same seed gives the same faults to the same calls.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            rng: Rng::seeded(seed),
            latency: Duration::ZERO,
            down: false,
            fail: (0.0, ErrorKind::Unavailable),
            truncate: 0.0,
            flip: 0.0,
            script: VecDeque::new(),
            counts: Counts::default(),
        })))
    }

    /// How long each call takes beyond what the store takes.
    pub fn set_latency(&self, latency: Duration) {
        self.state().latency = latency;
    }

    /// Whether the store is down: all calls fail as `Unavailable`, also those that wait out their latency.
    pub fn set_down(&self, down: bool) {
        self.state().down = down;
    }

    /// The part of calls, 0 to 1, that fail, and how.
    pub fn set_fail(&self, part: f64, kind: ErrorKind) {
        self.state().fail = (part, kind);
    }

    /// The part of reads, 0 to 1, whose answers are cut.
    pub fn set_truncate(&self, part: f64) {
        self.state().truncate = part;
    }

    /// The part of reads, 0 to 1, whose answers have a wrong bit.
    pub fn set_flip(&self, part: f64) {
        self.state().flip = part;
    }

    /// What happens to the next calls, one each, in place of chance.
    pub fn script(&self, faults: impl IntoIterator<Item = Fault>) {
        self.state().script.extend(faults);
    }

    /// What went through so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.state().counts
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Draws what happens to a call. All chances are drawn each time, so that one setting does not shift the others.
    fn draw(&self, reads: bool) -> Fault {
        let mut state = self.state();
        state.counts.calls += 1;
        let [fail, truncate, flip] = [state.rng.fraction(), state.rng.fraction(), state.rng.fraction()];
        if let Some(fault) = state.script.pop_front() {
            return fault;
        }
        match () {
            () if fail < state.fail.0 => Fault::Fail(state.fail.1),
            () if reads && truncate < state.truncate => Fault::Truncate,
            () if reads && flip < state.flip => Fault::Flip,
            () => Fault::None,
        }
    }

    /// Waits and fails as drawn, before the call.
    async fn before(&self, op: &'static str, key: &str, reads: bool) -> Result<Fault, StoreError> {
        let fault = self.draw(reads);
        let mut wait = self.state().latency;
        if let Fault::Delay(more) = fault {
            wait += more;
        }
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        let kind = match fault {
            _ if self.state().down => ErrorKind::Unavailable,
            Fault::Fail(kind) => kind,
            _ => return Ok(fault),
        };
        Err(self.injected(op, key, kind))
    }

    fn injected(&self, op: &'static str, key: &str, kind: ErrorKind) -> StoreError {
        self.state().counts.faults += 1;
        StoreError::Injected { op, key: key.to_owned(), kind }
    }

    /// The answer of a read, damaged as drawn.
    fn spoil(&self, fault: Fault, key: &Key, bytes: Bytes) -> Result<Bytes, StoreError> {
        let mut state = self.state();
        let whole = bytes.len() as u64;
        let answer = match fault {
            Fault::Truncate if whole > 0 => {
                state.counts.faults += 1;
                let keep = state.rng.below(whole);
                bytes.slice(..keep as usize)
            }
            Fault::Flip if whole > 0 => {
                state.counts.faults += 1;
                let bit = state.rng.below(whole * 8);
                let mut copy = bytes.to_vec();
                copy[(bit / 8) as usize] ^= 1 << (bit % 8);
                Bytes::from(copy)
            }
            _ => bytes,
        };
        state.counts.read_bytes += answer.len() as u64;
        exact::exactly(key, whole, answer)
    }
}

/// A store that goes wrong as it is told.
#[derive(Debug)]
pub struct Faulty<S> {
    inner: S,
    faults: Faults,
}

impl<S: Store> Faulty<S> {
    /// Wraps a store; keep a clone of the handle to steer it.
    pub fn new(inner: S, faults: Faults) -> Self {
        Self { inner, faults }
    }

    /// Runs a call that gives no bytes.
    async fn plain<T>(
        &self,
        op: &'static str,
        key: &str,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let fault = self.faults.before(op, key, false).await?;
        let done = call.await?;
        if fault == Fault::LoseAnswer { Err(self.faults.injected(op, key, ErrorKind::Timeout)) } else { Ok(done) }
    }

    /// Runs a call that gives bytes.
    async fn read(
        &self,
        op: &'static str,
        key: &Key,
        call: impl Future<Output = Result<Bytes, StoreError>>,
    ) -> Result<Bytes, StoreError> {
        let fault = self.faults.before(op, key.as_str(), true).await?;
        self.faults.state().counts.gets += 1;
        let bytes = call.await?;
        if fault == Fault::LoseAnswer {
            return Err(self.faults.injected(op, key.as_str(), ErrorKind::Timeout));
        }
        self.faults.spoil(fault, key, bytes)
    }

    fn wrote(&self, bytes: u64) {
        let mut state = self.faults.state();
        state.counts.puts += 1;
        state.counts.written_bytes += bytes;
    }
}

#[async_trait]
impl<S: Store> Store for Faulty<S> {
    async fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Bytes, StoreError> {
        self.read("get_range", key, self.inner.get_range(key, range)).await
    }

    async fn get(&self, key: &Key, max_len: u64) -> Result<Bytes, StoreError> {
        self.read("get", key, self.inner.get(key, max_len)).await
    }

    async fn head(&self, key: &Key) -> Result<Option<ObjectMeta>, StoreError> {
        self.plain("head", key.as_str(), self.inner.head(key)).await
    }

    async fn put_if_absent(&self, key: &Key, body: Body) -> Result<Put, StoreError> {
        let length = if let Body::Bytes(bytes) = &body { bytes.len() as u64 } else { 0 };
        let put = async {
            let put = self.inner.put_if_absent(key, body).await?;
            self.wrote(if put == Put::Created { length } else { 0 });
            Ok(put)
        };
        self.plain("put_if_absent", key.as_str(), put).await
    }

    async fn put(&self, key: &Key, bytes: Bytes) -> Result<(), StoreError> {
        let length = bytes.len() as u64;
        let put = async {
            self.inner.put(key, bytes).await?;
            self.wrote(length);
            Ok(())
        };
        self.plain("put", key.as_str(), put).await
    }

    fn list(&self, prefix: Option<&Key>) -> ListStream<'_> {
        let name = prefix.map(Key::to_string).unwrap_or_default();
        let pages = self.inner.list(prefix);
        let opened = async move {
            match self.faults.before("list", &name, false).await {
                Ok(_) => pages,
                Err(error) => stream::iter([Err(error)]).boxed(),
            }
        };
        stream::once(opened).flatten().boxed()
    }

    async fn delete(&self, key: &Key) -> Result<(), StoreError> {
        self.plain("delete", key.as_str(), self.inner.delete(key)).await
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.plain("check", "", self.inner.check()).await
    }

    async fn sweep(&self, older_than: Duration) -> Result<u64, StoreError> {
        self.plain("sweep", "", self.inner.sweep(older_than)).await
    }

    fn describe(&self) -> String {
        format!("{} with injected faults", self.inner.describe())
    }
}
