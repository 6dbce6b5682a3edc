//! What is brought before anybody asks: ahead of a reader, or by the trace of an earlier one; and recording traces.

use super::budget::Lane;
use super::source::SourceError;
use super::{Want, bring};
use crate::control::Event;
use crate::layer::Layer;
use crate::server::Core;
use corral_format::trace;
use corral_store::{Key, StoreError};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// The class whose trace serves for those that have none.
const DEFAULT: &str = "default";
/// Chunks of a trace that are claimed together: enough for neighbours to find each other.
const STRETCH: usize = 64;
/// How long the store may take for what nobody waits for.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of the largest trace that is read.
const MAX_TRACE: u64 = 1 << 20;

/// Where the trace of a class lies.
///
/// # Errors
/// What cannot be a class.
pub(crate) fn trace_key(layer: &Layer, class: &str) -> Result<Key, StoreError> {
    let key = Key::parse(format!("layers/{}/traces/{class}", layer.id))?;
    // A class is one segment, so that no trace lies below another.
    if class.contains('/') { Key::parse("/") } else { Ok(key) }
}

/// Brings what lies before a reader.
pub(crate) fn ahead(core: &Arc<Core>, layer: &Arc<Layer>, chunks: Range<usize>, cgroup: Option<Arc<str>>) {
    let (core, layer) = (Arc::clone(core), Arc::clone(layer));
    let runtime = core.runtime.clone();
    runtime.spawn(async move {
        let want = Want { lane: Lane::Ahead, deadline: Instant::now() + PATIENCE, pid: 0, cgroup };
        bring::bring_later(core, layer, chunks.collect(), want).await;
    });
}

/// Brings what the class's trace names and begins to record the next one. Goes on in the background.
pub(crate) fn open(core: &Arc<Core>, layer: &Arc<Layer>, class: &str) {
    let (core, layer, class) = (Arc::clone(core), Arc::clone(layer), class.to_owned());
    let most = core.config.trace_chunks.min(trace::MAX_ENTRIES);
    let full = layer.recorders.begin(&class, layer.manifest.chunks.len(), most);
    let runtime = core.runtime.clone();
    runtime.spawn(async move {
        let own = read(&core, &layer, &class).await;
        let known = match &own {
            Ok(Some(known)) => known.clone(),
            // Without one of its own; a class that cannot be asked about has none either.
            _ if class != DEFAULT => read(&core, &layer, DEFAULT).await.ok().flatten().unwrap_or_default(),
            _ => Vec::new(),
        };
        let bringing = tokio::spawn(replay(Arc::clone(&core), Arc::clone(&layer), known));
        if let Some(full) = full {
            // Either way it has been long enough.
            timeout(core.config.trace_time, full.notified()).await.unwrap_or(());
            let seen = layer.recorders.end(&class);
            if let Ok(own) = own {
                write(&core, &layer, &class, own, seen).await;
            }
        }
        bringing.await.unwrap_or(());
    });
}

/// A trace of the store, or nothing where there is none.
async fn read(core: &Core, layer: &Layer, class: &str) -> Result<Option<Vec<u32>>, SourceError> {
    let key = trace_key(layer, class).map_err(|e| SourceError::Final(e.to_string()))?;
    match core.source.find(&key, MAX_TRACE, Instant::now() + PATIENCE).await {
        // One that cannot be read is as good as none.
        Ok(frame) => Ok(frame.and_then(|frame| trace::unpack(&frame).ok()).map(|chunks| sound(layer, &chunks))),
        Err(SourceError::Final(_)) => Ok(None),
        Err(late) => Err(late),
    }
}

/// Chunks that the layer has, each once.
fn sound(layer: &Layer, chunks: &[u32]) -> Vec<u32> {
    let mut seen = HashSet::new();
    let total = layer.manifest.chunks.len();
    chunks.iter().copied().filter(|chunk| (*chunk as usize) < total && seen.insert(*chunk)).collect()
}

async fn replay(core: Arc<Core>, layer: Arc<Layer>, trace: Vec<u32>) {
    for stretch in trace.chunks(STRETCH) {
        let chunks: Vec<usize> = stretch.iter().map(|chunk| *chunk as usize).collect();
        let want = Want { lane: Lane::Trace, deadline: Instant::now() + PATIENCE, pid: 0, cgroup: None };
        bring::bring_later(Arc::clone(&core), Arc::clone(&layer), chunks, want).await;
    }
}

/// Writes what was read first, unless the store knows it already.
async fn write(core: &Core, layer: &Layer, class: &str, known: Option<Vec<u32>>, seen: Vec<u32>) {
    let Some(next) = merge(known, seen) else { return };
    let Ok(key) = trace_key(layer, class) else { return };
    let written = core.source.put(&key, trace::pack(&next).into()).await;
    match written {
        Ok(()) => core.events.push(Event::TraceWritten {
            layer: layer.id,
            class: class.to_owned(),
            chunks: next.len() as u64,
        }),
        Err(error) => tracing::warn!(layer = %layer.id, class, %error, "a trace cannot be written"),
    }
}

/// What a trace becomes: what was known and then what is new; nothing where little is. What was known and not read now
/// stays, as the kernel may have had it in memory.
fn merge(known: Option<Vec<u32>>, seen: Vec<u32>) -> Option<Vec<u32>> {
    const NOTABLE: usize = 10;
    let Some(mut known) = known else { return (!seen.is_empty()).then_some(seen) };
    let old: HashSet<u32> = known.iter().copied().collect();
    let new: Vec<u32> = seen.into_iter().filter(|chunk| !old.contains(chunk)).collect();
    if new.is_empty() || new.len() * NOTABLE < known.len() {
        return None;
    }
    known.extend(new);
    known.truncate(trace::MAX_ENTRIES);
    Some(known)
}

#[cfg(test)]
mod tests {
    use super::merge;

    #[test]
    fn traces_grow_when_there_is_much_to_add() {
        assert_eq!(merge(None, vec![]), None);
        assert_eq!(merge(None, vec![3, 1]), Some(vec![3, 1]));
        assert_eq!(merge(Some(vec![3, 1]), vec![1]), None);
        assert_eq!(merge(Some(vec![3, 1]), vec![1, 9]), Some(vec![3, 1, 9]));
        assert_eq!(merge(Some((0..100).collect()), (50..105).collect()), None);
    }
}
