//! Progress on its way to the client.

use corral_api::build::BuildProgress;
use corral_api::command::StreamName;
use corral_dockerfile::Step;
use std::sync::atomic::{AtomicU32, Ordering};
use tokio::sync::mpsc;

/// Where a build tells how far it is. A slow client slows the build; one that is gone is noticed elsewhere.
#[derive(Debug)]
pub struct Report {
    lines: mpsc::Sender<BuildProgress>,
    number: AtomicU32,
    total: u32,
}

impl Report {
    /// Of a build of so many steps.
    pub fn new(lines: mpsc::Sender<BuildProgress>, total: usize) -> Self {
        Self { lines, number: AtomicU32::new(0), total: u32::try_from(total).unwrap_or(u32::MAX) }
    }

    async fn send(&self, line: BuildProgress) {
        // A client that hung up needs no progress.
        self.lines.send(line).await.unwrap_or(());
    }

    /// Number of the step that is on.
    pub fn number(&self) -> u32 {
        self.number.load(Ordering::Relaxed)
    }

    /// The next step begins.
    pub fn begin(&self) {
        self.number.fetch_add(1, Ordering::Relaxed);
    }

    /// Tells the step that is on.
    pub async fn step(&self, step: &Step, cached: bool) {
        let line = u32::try_from(step.line).unwrap_or(u32::MAX);
        let (number, total, text) = (self.number(), self.total, step.text.clone());
        self.send(BuildProgress::Step { number, total, line, text, cached }).await;
    }

    /// Passes output of the step's command on.
    pub async fn output(&self, stream: StreamName, text: String) {
        if !text.is_empty() {
            self.send(BuildProgress::Output { number: self.number(), stream, text }).await;
        }
    }

    /// Something to know.
    pub async fn note(&self, text: String) {
        self.send(BuildProgress::Note { text }).await;
    }
}
