//! What happened on this node, numbered without gaps, kept in the ledger and told to who listens.

use crate::ledger::{Change, Ledger};
use corral_api::ids::SandboxId;
use corral_api::sandbox::{Event, EventKind};
use std::sync::Mutex;
use tokio::sync::broadcast;

/// Events a slow listener may fall behind before it has to read them from the ledger.
const BUFFER: usize = 4096;

/// The numbering and the listeners.
#[derive(Debug)]
pub struct Events {
    last: Mutex<u64>,
    listeners: broadcast::Sender<Event>,
}

impl Events {
    /// Goes on after the last number in the ledger.
    pub fn after(last: u64) -> Self {
        Self { last: Mutex::new(last), listeners: broadcast::channel(BUFFER).0 }
    }

    /// Records an event, with other changes that belong to it, in order.
    pub fn record(&self, ledger: &Ledger, sandbox: &SandboxId, what: EventKind, mut changes: Vec<Change>) {
        // The lock is held over the post, so that numbers enter the ledger in order.
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *last += 1;
        let event =
            Event { seq: *last, at: crate::clock::rfc3339(crate::clock::now_ms()), sandbox_id: sandbox.clone(), what };
        changes.push(Change::Event(Box::new(event.clone())));
        ledger.post(changes);
        // Nobody listening is fine.
        let _listeners = self.listeners.send(event);
    }

    /// Number of the last event.
    pub fn last(&self) -> u64 {
        *self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Listens to events from now on.
    pub fn listen(&self) -> broadcast::Receiver<Event> {
        self.listeners.subscribe()
    }
}
