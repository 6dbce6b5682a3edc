//! How much output of ended commands is kept for a sandbox. Each log is bounded by itself; their sum is here: the output
//! of the command that ended first goes first. The command's record stays, and says that its output is gone.

use crate::ledger::{Change, CommandRecord};
use crate::node::Core;
use crate::sandbox::Sandbox;
use corral_api::ids::CommandId;
use std::collections::VecDeque;
use std::sync::Arc;

/// Endings of a command's log files.
const STREAMS: [&str; 3] = ["out", "err", "ctl"];

/// Logs of ended commands, the first to go in front.
#[derive(Debug, Default)]
pub struct KeptLogs {
    order: VecDeque<(CommandId, u64)>,
    bytes: u64,
}

impl KeptLogs {
    /// Takes in the log of a command that ended, or what its survivors have made of it since, and gives those that are
    /// beyond `limit`. The newest always stays.
    fn add(&mut self, id: CommandId, bytes: u64, limit: u64) -> Vec<CommandId> {
        // Most that grow ended lately.
        match self.order.iter_mut().rev().find(|(known, _)| *known == id) {
            Some((_, before)) => {
                self.bytes = self.bytes - *before + bytes;
                *before = bytes;
            }
            None => {
                self.bytes += bytes;
                self.order.push_back((id, bytes));
            }
        }
        let mut gone = Vec::new();
        while self.bytes > limit && self.order.len() > 1 {
            let Some((id, bytes)) = self.order.pop_front() else { break };
            self.bytes -= bytes;
            gone.push(id);
        }
        gone
    }
}

/// What a command's logs take at most.
fn kept_bytes(record: &CommandRecord) -> u64 {
    let bound = record.head_bytes.saturating_add(record.tail_bytes);
    record.totals.iter().map(|total| total.min(&bound)).sum()
}

impl Core {
    /// Counts the output of a command that has ended, and drops what is beyond the limit.
    pub(super) fn retain_output(self: &Arc<Self>, sandbox: &Arc<Sandbox>, record: &CommandRecord) {
        let bytes = kept_bytes(record);
        // One of a session has its output in its shell's log.
        if record.within.is_some() || record.output_gone {
            return;
        }
        let (gone, commands) = {
            let mut inner = sandbox.lock();
            let gone = inner.kept_logs.add(record.id.clone(), bytes, self.config.keep_output_bytes);
            if gone.is_empty() {
                return;
            }
            (gone, inner.commands.values().cloned().collect::<Vec<_>>())
        };
        let mut changes = Vec::new();
        for command in commands {
            let mut record = command.lock();
            if gone.contains(record.within.as_ref().map_or(&record.id, |within| &within.shell)) {
                record.output_gone = true;
                changes.push(Change::Command(Box::new(record.clone())));
            }
        }
        self.ledger.post(changes);
        let dir = self.log_dir(&sandbox.id);
        tokio::task::spawn_blocking(move || {
            for (id, stream) in gone.iter().flat_map(|id| STREAMS.map(|stream| (id, stream))) {
                // Not every command has every stream.
                std::fs::remove_file(dir.join(format!("{id}.{stream}"))).unwrap_or(());
            }
        });
    }

    /// Counts the output of commands that had ended before this node was started.
    pub(crate) fn retain_adopted(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        let commands: Vec<_> = sandbox.lock().commands.values().cloned().collect();
        let mut ended: Vec<CommandRecord> = commands.iter().map(|c| c.lock().clone()).collect();
        ended.retain(|record| record.end.is_some());
        ended.sort_by_key(|record| record.ended_ms);
        for record in ended {
            self.retain_output(sandbox, &record);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_goes_and_the_newest_stays() {
        let ids: Vec<CommandId> = (0..4).map(|_| CommandId::random()).collect();
        let mut kept = KeptLogs::default();
        assert!(kept.add(ids[0].clone(), 40, 100).is_empty());
        assert!(kept.add(ids[1].clone(), 60, 100).is_empty());
        assert_eq!(kept.add(ids[2].clone(), 30, 100), [ids[0].clone()]);
        assert_eq!(kept.add(ids[3].clone(), 500, 100), [ids[1].clone(), ids[2].clone()], "the newest stays");
        assert_eq!(kept.bytes, 500);
        assert!(kept.add(ids[3].clone(), 90, 100).is_empty(), "it is known");
        assert!(kept.add(ids[0].clone(), 0, 100).is_empty());
        assert_eq!(kept.add(ids[0].clone(), 20, 100), [ids[3].clone()], "survivors count");
        assert_eq!(kept.bytes, 20);
    }
}
