//! Watching over the server of lazy reads and its holder.
//!
//! Each takes the place of the other. When both end at once, or neither answers, the node starts them anew; readers wait
//! meanwhile, since the node has kept a copy of their connection. Only when the node is gone at that moment too is the
//! connection lost: the next node ends the sandboxes that read through it.
//!
//! | holder and server | connection | then |
//! |---|---|---|
//! | one of them runs and answers | | nothing |
//! | they run, and do not answer for [`SILENCES`] questions | | both killed, and as below |
//! | both are gone | kept | others go on with it: readers have waited |
//! | both are gone | lost, or was unmounted | others begin, and what reads through the old one is ended |

use super::Lazy;
use crate::node::Core;
use corral_api::digest::Digest;
use corral_api::sandbox::{EndReason, EndStatus};
use corral_lazy::client::{LazyLink, LinkError};
use corral_lazy::{Lifeline, holder};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Between looks at whether they run.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Looks between two questions.
const ASK_EVERY: u32 = 4;
/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(4);
/// Questions in a row that may stay without an answer: more than the holder has patience with its server. Counted so, not
/// in time, a host that stood still itself blames nobody.
const SILENCES: u32 = 4;

/// What a sandbox is told that read through a connection that is lost.
const LOST: &str = "the connection through which its layers were read was lost: the server of lazy reads and its holder \
                    were ended, or the node's agent ended together with them";

impl Lazy {
    /// Asks whoever serves, and copies its connection where the host lets that be done.
    async fn keep(&self) -> Result<Result<Lifeline, io::Error>, LinkError> {
        let ask = async {
            let mut link = LazyLink::connect(&self.socket).await?;
            let who = link.who().await?;
            Ok(Lifeline::of(who.holder_pid).map_err(io::Error::from))
        };
        tokio::time::timeout(ANSWER, ask).await.map_err(|_| LinkError::Timeout)?
    }
}

impl Core {
    /// Watches until the node ends.
    pub async fn guard_lazy(self: Arc<Self>, lazy: Arc<Lazy>) {
        let (mut kept, mut looks, mut silent) = (None, 0_u32, 0);
        let mut is_told = false;
        loop {
            if !holder::is_held(&lazy.root) {
                self.renew_lazy(&lazy, &mut kept).await;
                (looks, silent) = (0, 0);
            } else if looks.is_multiple_of(ASK_EVERY) {
                match lazy.keep().await {
                    Ok(Ok(lifeline)) => (kept, silent) = (Some(lifeline), 0),
                    Ok(Err(error)) => {
                        silent = 0;
                        if !std::mem::replace(&mut is_told, true) {
                            tracing::warn!(%error, "the connection of the server of lazy reads cannot be kept");
                        }
                    }
                    Err(error) => {
                        silent += 1;
                        tracing::warn!(%error, silent, "the server of lazy reads does not answer");
                    }
                }
            }
            if silent == SILENCES {
                tracing::error!("the server of lazy reads and its holder stand still: they are replaced");
                kept =
                    kept.or_else(|| holder::processes(&lazy.root).into_iter().find_map(|pid| Lifeline::of(pid).ok()));
                if let Err(error) = corral_lazy::client::end(&lazy.root).await {
                    tracing::error!(%error, "they cannot be ended: reads of layers that are not here wait");
                }
                silent = 0;
                continue;
            }
            looks = looks.wrapping_add(1);
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Starts a holder where there is none.
    async fn renew_lazy(self: &Arc<Self>, lazy: &Lazy, kept: &mut Option<Lifeline>) {
        // Where it was told to end, or the mount was taken away, no layer can be opened through what was kept.
        if !holder::is_mounted(&lazy.root) || kept.as_ref().is_some_and(|kept| !kept.is_connected()) {
            *kept = None;
        }
        match (lazy.start_with(kept.as_ref()).await, kept.is_some()) {
            (Ok(false), _) => {}
            (Ok(true), true) => {
                tracing::error!("the server of lazy reads and its holder ended: others go on, readers waited");
            }
            (Ok(true), false) => {
                tracing::error!("the server of lazy reads, its holder and their connection ended: others began");
                self.lose_lazy().await;
            }
            (Err(error), _) => {
                tracing::error!(error = %crate::error::chain(&error), "the server of lazy reads cannot be started again");
            }
        }
    }

    /// Lets go of all mounts that read through a connection that is lost, and ends the sandboxes that have them: every read
    /// fails there, for ever.
    pub async fn lose_lazy(self: &Arc<Self>) {
        let layers = self.layers.clone();
        let lost = tokio::task::spawn_blocking(move || layers.detach_lazy()).await;
        let lost: BTreeSet<Digest> = match lost {
            Ok(Ok(lost)) => lost.into_iter().collect(),
            Ok(Err(error)) => {
                tracing::error!(error = %crate::error::chain(&error), "mounts of layers that cannot be read stay");
                return;
            }
            Err(_) => return,
        };
        if lost.is_empty() {
            return;
        }
        let reads = |layers: &[Digest]| layers.iter().any(|digest| lost.contains(digest));
        let mut sandboxes = self.all();
        sandboxes.retain(|sandbox| reads(&sandbox.lock().record.environment.layers));
        tracing::error!(
            layers = lost.len(),
            sandboxes = sandboxes.len(),
            "sandboxes whose layers cannot be read are ended"
        );
        let end = |sandbox| async move { self.end(sandbox, EndStatus::new(EndReason::StorageError, LOST)).await };
        futures_util::future::join_all(sandboxes.iter().map(end)).await;
    }
}
