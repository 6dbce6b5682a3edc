//! What the keepers tell, brought to the sandboxes and commands it is about.

use crate::node::Core;
use corral_api::sandbox::{EndReason, EndStatus};
use corral_keeper::protocol::Request;
use corral_runtime::keeper_link::Notice;
use std::sync::Arc;
use tokio::sync::mpsc;

impl Core {
    /// Handles notices until the node ends.
    pub async fn hear(self: Arc<Self>, mut notices: mpsc::UnboundedReceiver<(usize, Notice)>) {
        while let Some((keeper, notice)) = notices.recv().await {
            self.noticed(keeper, notice);
        }
    }

    /// Handles one notice.
    pub fn noticed(self: &Arc<Self>, keeper: usize, notice: Notice) {
        match notice {
            Notice::Sandbox(notice) => {
                let Some(sandbox) = self.live(&notice.sandbox) else { return };
                if let Some(exit) = notice.exit {
                    self.first_process_ended(&sandbox, exit);
                }
            }
            Notice::Command(notice) => {
                let Some(sandbox) = self.live(&notice.sandbox) else { return };
                match sandbox.command(&notice.command) {
                    Some(command) => self.command_noticed(&sandbox, &command, &notice),
                    // One that nobody knows, such as one whose start was answered as failed: the keeper may forget it.
                    None if notice.exit.is_some() => {
                        let link = self.keepers.get(keeper).and_then(|k| k.link());
                        tokio::spawn(async move {
                            if let Some(link) = link {
                                // A keeper that is gone has nothing to forget.
                                let _forgotten = link.ask(Request::Acknowledge { command: notice.command }).await;
                            }
                        });
                    }
                    None => {}
                }
            }
            Notice::Lost => self.keeper_lost(keeper),
        }
    }

    /// A keeper died: its sandboxes' outputs have nowhere to go and nobody can enter them, so they end.
    fn keeper_lost(self: &Arc<Self>, index: usize) {
        tracing::error!(keeper = index, "a keeper was lost; its sandboxes end");
        if let Some(keeper) = self.keepers.get(index) {
            keeper.disconnect();
        }
        for sandbox in self.all() {
            if sandbox.lock().record.keeper == index {
                sandbox.note_dead();
                let this = self.clone();
                tokio::spawn(async move {
                    this.end(&sandbox, EndStatus::new(EndReason::KeeperLost, "the keeper of this sandbox died")).await
                });
            }
        }
    }
}
