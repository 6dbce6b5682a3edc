//! Reading what commands wrote: by offset, following, and as results.

use super::{Command, Progress};
use crate::error::runtime_problem;
use crate::ledger::CommandRecord;
use crate::node::Core;
use base64::Engine;
use corral_api::command::{ExecResult, INLINE_OUTPUT_BYTES, OutputText, StreamName};
use corral_api::problem::{ErrorKind, Problem};
use corral_runtime::log_reader::{Chunk, LogReader};
use std::sync::Arc;
use tokio::sync::watch;

/// Bytes read at a time.
const PIECE: usize = 256 << 10;

/// A stream of a command, open for reading.
#[derive(Debug)]
pub struct OutputReader {
    /// Nothing where the command has no such stream, such as a merged standard error.
    log: Option<LogReader>,
    stream: StreamName,
    /// Offset of the command's first byte in the log: not 0 in a session's.
    base: u64,
    /// Bytes there were when the command was last recorded.
    recorded: u64,
    /// For a running command: how far it is.
    progress: Option<watch::Receiver<Progress>>,
    within: bool,
    /// For a running command of a session: how far its shell is, which tells what it has written.
    shell: Option<watch::Receiver<Progress>>,
}

impl Core {
    /// Opens a stream of a command, live or ended.
    ///
    /// # Errors
    /// When its log cannot be opened.
    pub fn open_output(
        &self,
        record: &CommandRecord,
        live: Option<&Command>,
        stream: StreamName,
    ) -> Result<OutputReader, Problem> {
        let (owner, base) = match &record.within {
            Some(within) => (&within.shell, within.from[stream as usize]),
            None => (&record.id, 0),
        };
        let ending = match stream {
            StreamName::Stdout => "out",
            StreamName::Stderr => "err",
        };
        let path = self.log_dir(&record.sandbox).join(format!("{owner}.{ending}"));
        let bounds = match record.within {
            Some(_) => crate::ledger::DEFAULT_BOUNDS,
            None => record.bounds(),
        };
        let log =
            if path.exists() { Some(LogReader::open(&path, bounds).map_err(|e| runtime_problem(&e))?) } else { None };
        let shell = live.and(record.within.as_ref()).and_then(|within| {
            let shell = self.live(&record.sandbox)?.command(&within.shell)?;
            Some(shell.progress.subscribe())
        });
        Ok(OutputReader {
            log,
            shell,
            stream,
            base,
            recorded: record.totals[stream as usize],
            progress: live.map(|c| c.progress.subscribe()),
            within: record.within.is_some(),
        })
    }

    /// A command's result, with as much of its output as goes into JSON.
    ///
    /// # Errors
    /// When a log cannot be read.
    pub async fn result(
        self: &Arc<Self>,
        record: &CommandRecord,
        live: Option<&Arc<Command>>,
    ) -> Result<ExecResult, Problem> {
        let end = record.end.clone().ok_or_else(|| Problem::new(ErrorKind::Conflict, "the command still runs"))?;
        let mut texts = [OutputText::default(), OutputText::default()];
        for (text, stream) in texts.iter_mut().zip([StreamName::Stdout, StreamName::Stderr]) {
            let total = record.totals[stream as usize];
            if total == 0 {
                *text = OutputText { text: Some(String::new()), base64: None, complete: true };
                continue;
            }
            let reader = self.open_output(record, live.map(AsRef::as_ref), stream)?;
            *text = if total <= PIECE as u64 {
                inline(&reader, total)?
            } else {
                tokio::task::spawn_blocking(move || inline(&reader, total))
                    .await
                    .map_err(|_| Problem::new(ErrorKind::Internal, "reading the output failed"))??
            };
        }
        let [stdout, stderr] = texts;
        Ok(ExecResult { exit_code: end.shell_status(), command: record.status(record.totals), stdout, stderr })
    }
}

fn inline(reader: &OutputReader, total: u64) -> Result<OutputText, Problem> {
    let mut bytes = Vec::with_capacity(total.min(INLINE_OUTPUT_BYTES) as usize);
    let mut at = 0;
    while (bytes.len() as u64) < INLINE_OUTPUT_BYTES {
        let chunk = reader.read(at, PIECE.min((INLINE_OUTPUT_BYTES as usize) - bytes.len()), total)?;
        if chunk.bytes.is_empty() {
            break;
        }
        at = chunk.offset + chunk.bytes.len() as u64;
        bytes.extend(chunk.bytes);
    }
    let complete = bytes.len() as u64 == total;
    Ok(match String::from_utf8(bytes) {
        Ok(text) => OutputText { text: Some(text), base64: None, complete },
        Err(error) => {
            let base64 = base64::engine::general_purpose::STANDARD.encode(error.as_bytes());
            OutputText { text: None, base64: Some(base64), complete }
        }
    })
}

impl OutputReader {
    /// Bytes written so far.
    pub fn total(&self) -> u64 {
        let of = |progress: &Option<watch::Receiver<Progress>>| {
            progress.as_ref().map_or(0, |p| p.borrow().totals[self.stream as usize])
        };
        let live = match &self.progress {
            Some(progress) if self.within && progress.borrow().end.is_none() => {
                of(&self.shell).saturating_sub(self.base)
            }
            progress => of(progress),
        };
        let by_file = match (&self.log, &self.progress, self.within) {
            // Of a command that had ended before this node was started only the file knows what its survivors wrote.
            (Some(log), progress, false) if progress.as_ref().is_none_or(|p| p.borrow().end.is_some()) => {
                log.total().unwrap_or(0)
            }
            _ => 0,
        };
        live.max(self.recorded).max(by_file)
    }

    /// Reads from an offset, given that `total` bytes were written.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn read(&self, offset: u64, most: usize, total: u64) -> Result<Chunk, Problem> {
        let Some(log) = &self.log else { return Ok(Chunk { offset, bytes: Vec::new() }) };
        let most = (most as u64).min(total.saturating_sub(offset)) as usize;
        if most == 0 {
            return Ok(Chunk { offset: offset.min(total), bytes: Vec::new() });
        }
        let in_log =
            if self.within { log.total().map_err(|e| runtime_problem(&e))?.max(self.base + total) } else { total };
        let mut chunk = log.read(self.base + offset, most, in_log).map_err(|e| runtime_problem(&e))?;
        chunk.offset = chunk.offset.saturating_sub(self.base);
        let room = total.saturating_sub(chunk.offset) as usize;
        chunk.bytes.truncate(room);
        Ok(chunk)
    }

    /// The next bytes from an offset: what is there, or, following, what comes; nothing at the end.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn next(&mut self, offset: u64, follow: bool) -> Result<Option<Chunk>, Problem> {
        loop {
            // First whether it has ended, then what it wrote: so nothing written before the end is missed.
            let ended = self.progress.as_ref().is_none_or(|p| p.borrow().end.is_some() || p.borrow().failed.is_some());
            let total = self.total();
            if offset < total {
                let chunk = self.read(offset, PIECE, total)?;
                if !chunk.bytes.is_empty() {
                    return Ok(Some(chunk));
                }
            }
            let Some(progress) = self.progress.as_mut().filter(|_| follow && !ended) else { return Ok(None) };
            let told = match &mut self.shell {
                None => progress.changed().await,
                Some(shell) => tokio::select! {
                    told = progress.changed() => told,
                    // The end of the shell comes with that of its command.
                    Ok(()) = shell.changed() => Ok(()),
                },
            };
            if told.is_err() {
                self.progress = None;
            }
        }
    }
}
