//! What happens by the clock: ends by TTL, space for writable layers, forgetting what ended long ago, balancing cores.

use crate::balance::Balance;
use crate::ledger::{Change, FORGET_BATCH, LedgerError};
use crate::node::Core;
use crate::reminder::Reminder;
use corral_api::ids::SandboxId;
use corral_api::sandbox::{EndReason, EndStatus, State};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often TTLs are looked at: their precision.
const TICK: Duration = Duration::from_millis(250);
/// Ticks between rounds of the slower work.
const SLOW_TICKS: u32 = 8;
/// The longest time between rounds of forgetting.
const FORGET_EVERY: Duration = Duration::from_secs(60);
/// Most events kept.
const EVENTS_KEPT: u64 = 1_000_000;

/// Memory of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// All.
    pub total_bytes: u64,
    /// What could be had without swapping.
    pub available_bytes: u64,
}

/// Reads /proc/meminfo.
pub fn memory() -> Memory {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |key: &str| {
        text.lines()
            .find_map(|l| l.strip_prefix(key)?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
            .unwrap_or(0)
    };
    Memory { total_bytes: kib("MemTotal:") << 10, available_bytes: kib("MemAvailable:") << 10 }
}

/// What the slower work remembers from round to round.
#[derive(Debug, Default)]
struct Slow {
    balance: Balance,
    /// Whether the space for writable layers is low.
    low: Reminder,
}

impl Core {
    /// Runs until the node ends.
    pub async fn keep_up(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let mut slow = Slow::default();
        let forget_ticks = forget_ticks(self.config.keep_ended);
        for round in 1u32.. {
            ticks.tick().await;
            self.end_overdue();
            self.ballast.keep();
            if round % SLOW_TICKS == 0 {
                let this = self.clone();
                let mut own = std::mem::take(&mut slow);
                let done = tokio::task::spawn_blocking(move || {
                    this.slow_round(&mut own);
                    own
                });
                slow = done.await.unwrap_or_default();
            }
            if (round - 1) % forget_ticks == 0 {
                self.forget_old().await;
            }
        }
    }

    fn end_overdue(self: &Arc<Self>) {
        let now = crate::clock::now_ms();
        for sandbox in self.all() {
            let (idle_ttl, max_ttl, created) = {
                let inner = sandbox.lock();
                (inner.record.spec.idle_ttl_ms, inner.record.spec.max_ttl_ms, inner.record.created_ms)
            };
            if !matches!(sandbox.state(), State::Running | State::Paused) {
                continue;
            }
            let reason = if max_ttl > 0 && now.saturating_sub(created) >= max_ttl {
                EndStatus::new(EndReason::MaxTtl, format!("it lived for its {max_ttl} ms"))
            } else if idle_ttl > 0 && sandbox.idle_ms(now) >= idle_ttl {
                EndStatus::new(EndReason::IdleTtl, format!("no request for {idle_ttl} ms"))
            } else {
                continue;
            };
            let this = self.clone();
            tokio::spawn(async move { this.end(&sandbox, reason).await });
        }
    }

    fn slow_round(&self, slow: &mut Slow) {
        match self.containers.writable().ensure_room() {
            Ok(()) if slow.low.over() => tracing::info!("there is space for writable layers again"),
            Ok(()) => {}
            Err(error) if slow.low.holds(Instant::now()) => {
                tracing::warn!(error = %crate::error::chain(&error), "the space for writable layers is low");
            }
            Err(_) => {}
        }
        self.containers.writable().sweep_quota_groups();
        let elapsed = u64::from(SLOW_TICKS) * TICK.as_millis() as u64;
        self.rebalance(&mut slow.balance, elapsed);
    }

    /// Forgets ended sandboxes, keys and events that are old or too many, a batch at a time.
    async fn forget_old(self: &Arc<Self>) {
        let before_ms = crate::clock::now_ms().saturating_sub(self.config.keep_ended.as_millis() as u64);
        let keep = self.config.keep_ended_count;
        loop {
            let old = match self.read_ledger(move |ledger| ledger.forgettable(before_ms, keep)).await {
                Ok(old) => old,
                Err(problem) => return tracing::error!(%problem, "old sandboxes cannot be found"),
            };
            let more = old.len() == FORGET_BATCH;
            if let Err(error) = self.forget(old, before_ms).await {
                return tracing::error!(error = %crate::error::chain(&error), "old sandboxes cannot be forgotten");
            }
            if !more {
                return;
            }
        }
    }

    async fn forget(self: &Arc<Self>, old: Vec<SandboxId>, before_ms: u64) -> Result<(), LedgerError> {
        let (this, ids) = (self.clone(), old.clone());
        let removed = tokio::task::spawn_blocking(move || {
            for id in &ids {
                // One that never ran a command has none.
                std::fs::remove_dir_all(this.log_dir(id)).unwrap_or(());
            }
        });
        removed.await.unwrap_or(());
        let mut changes: Vec<Change> = old.into_iter().map(Change::Forget).collect();
        changes.push(Change::Trim { before_ms, events: EVENTS_KEPT });
        self.ledger.write(changes).await
    }
}

/// Ticks between rounds of forgetting: a short keep time is kept to.
fn forget_ticks(keep: Duration) -> u32 {
    let every = FORGET_EVERY.min(keep / 2);
    u32::try_from(every.as_millis() / TICK.as_millis()).unwrap_or(u32::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgetting_comes_by_the_minute_or_twice_in_the_keep_time() {
        assert_eq!(forget_ticks(Duration::from_secs(24 * 3600)), 240);
        assert_eq!(forget_ticks(Duration::from_secs(2)), 4);
        assert_eq!(forget_ticks(Duration::from_millis(1)), 1);
    }
}
