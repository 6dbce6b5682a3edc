//! The control socket's server side.

use super::{After, Code, Done, EventLine, Evicted, Listening, MAX_REQUEST, Opened, Refusal, Reply, Request, Stats};
use crate::LayerId;
use crate::fetch::prefetch;
use crate::layer::{Layer, LayerError};
use crate::server::Core;
use serde::Serialize;
use std::io;
use std::sync::{Arc, PoisonError};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

/// Most clients at once; more wait.
const CLIENTS: usize = 128;

pub(crate) async fn serve(core: Arc<Core>, listener: UnixListener) {
    let places = Arc::new(Semaphore::new(CLIENTS));
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        match listener.accept().await {
            Ok((stream, _)) => {
                let core = Arc::clone(&core);
                tokio::spawn(async move {
                    if let Err(error) = client(&core, stream).await {
                        tracing::debug!(%error, "a client is gone");
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a client cannot be met");
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }
    }
}

async fn client(core: &Arc<Core>, stream: UnixStream) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    loop {
        line.clear();
        (&mut reader).take(MAX_REQUEST as u64).read_until(b'\n', &mut line).await?;
        if line.is_empty() {
            return Ok(());
        }
        if line.last() != Some(&b'\n') {
            let whole = if line.len() >= MAX_REQUEST { "the request is too long" } else { "the request is cut" };
            // What follows would be read as requests.
            return send(&mut writer, &Reply::<Done>::Error(invalid(whole))).await;
        }
        match serde_json::from_slice(&line) {
            Ok(Request::Events { after }) => return events(core, after, &mut reader, &mut writer).await,
            Ok(request) => answer(core, request, &mut writer).await?,
            Err(error) => send(&mut writer, &Reply::<Done>::Error(invalid(&error.to_string()))).await?,
        }
    }
}

async fn answer(core: &Arc<Core>, request: Request, writer: &mut OwnedWriteHalf) -> io::Result<()> {
    match request {
        Request::Open { layer, class } => send(writer, &reply(open(core, layer, class).await)).await,
        Request::Stats {} | Request::Events { .. } => send(writer, &Reply::Ok(stats(core))).await,
        Request::Forget { layer } => send(writer, &reply(forget(core, layer).await)).await,
        Request::Evict { layer } => send(writer, &reply(evict(core, layer).await)).await,
        Request::Upgrade { program } => {
            let asked = match program.is_absolute() {
                true => core.who.upgrade(&program).await,
                false => Err("its path is not absolute".to_owned()),
            };
            let is_well = asked.is_ok();
            let refused = |message| Refusal { code: Code::NotReplaced, message };
            let told = send(writer, &reply(asked.map(|()| Done {}).map_err(refused))).await;
            if is_well {
                core.who.go();
            }
            told
        }
        Request::Who {} => {
            let core = Arc::clone(core);
            let who = tokio::task::spawn_blocking(move || core.who()).await.map_err(io::Error::other)?;
            send(writer, &Reply::Ok(who)).await
        }
    }
}

async fn open(core: &Arc<Core>, id: LayerId, class: String) -> Result<Opened, Refusal> {
    let at = Arc::clone(core);
    let found = tokio::task::spawn_blocking(move || at.layers.find(id)).await;
    let layer = found.map_err(|e| damaged(e.to_string()))?.map_err(|error| unusable(&error))?;
    let no_class = |_| invalid("a class is one segment of a key: a-z, 0-9, '.', '_' and '-'");
    prefetch::trace_key(&layer, &class).map_err(no_class)?;
    prefetch::open(core, &layer, &class);
    Ok(opened(&layer))
}

fn opened(layer: &Layer) -> Opened {
    Opened { chunks_present: layer.map.present() as u64, chunks_total: layer.manifest.chunks.len() as u64 }
}

async fn evict(core: &Arc<Core>, id: LayerId) -> Result<Evicted, Refusal> {
    let at = Arc::clone(core);
    let evicted = tokio::task::spawn_blocking(move || at.layers.evict(id)).await;
    let freed_bytes = evicted.map_err(|e| damaged(e.to_string()))?.map_err(|error| unusable(&error))?;
    Ok(Evicted { freed_bytes })
}

async fn forget(core: &Arc<Core>, id: LayerId) -> Result<Done, Refusal> {
    let at = Arc::clone(core);
    // Waits for lookups, which other threads answer.
    let forgotten = tokio::task::spawn_blocking(move || {
        at.layers.forget(id);
        at.device.invalidate(&id.hex())
    });
    match forgotten.await {
        Ok(Ok(())) => Ok(Done {}),
        Ok(Err(error)) => Err(damaged(format!("the kernel keeps the name: {error}"))),
        Err(error) => Err(damaged(error.to_string())),
    }
}

fn stats(core: &Core) -> Stats {
    let (in_flight_bytes, in_flight_peak_bytes) = core.budget.used();
    Stats {
        layers: core.layers.open().iter().map(|layer| layer.stats.tell(layer)).collect(),
        total: core.layers.tally().tell(),
        cgroups: core.cgroups.tell(),
        in_flight_bytes,
        in_flight_peak_bytes,
        waiting_reads: core.waiting.lock().unwrap_or_else(PoisonError::into_inner).len() as u64,
        restarts: core.who.restarts(),
    }
}

/// Sends events until the client goes.
async fn events(
    core: &Arc<Core>,
    after: Option<After>,
    reader: &mut BufReader<OwnedReadHalf>,
    writer: &mut OwnedWriteHalf,
) -> io::Result<()> {
    let mut newest = core.events.watch();
    // Events of another process are gone with it; a client that saw none starts with what is kept.
    let same = after.is_none_or(|after| after.epoch == core.events.epoch);
    let mut seen = after.filter(|_| same).map_or(0, |after| after.seq);
    send(writer, &Reply::Ok(Listening { epoch: core.events.epoch, gap: !same })).await?;
    let mut word = [0; 1];
    loop {
        newest.mark_unchanged();
        let (records, lost) = core.events.after(seen);
        if lost > 0 {
            send(writer, &EventLine::Lost(lost)).await?;
        }
        for record in records {
            seen = record.seq;
            send(writer, &EventLine::Event(record)).await?;
        }
        tokio::select! {
            changed = newest.changed() => changed.map_err(io::Error::other)?,
            // A client has nothing more to say here.
            _ = reader.read(&mut word) => return Ok(()),
        }
    }
}

async fn send<T: Serialize>(writer: &mut OwnedWriteHalf, value: &T) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    writer.write_all(&line).await
}

fn reply<T>(done: Result<T, Refusal>) -> Reply<T> {
    match done {
        Ok(value) => Reply::Ok(value),
        Err(refusal) => Reply::Error(refusal),
    }
}

fn invalid(message: &str) -> Refusal {
    Refusal { code: Code::Invalid, message: message.to_owned() }
}

fn unusable(error: &LayerError) -> Refusal {
    match error {
        LayerError::Unknown(_) => Refusal { code: Code::UnknownLayer, message: error.to_string() },
        LayerError::Io { source, .. } => damaged(format!("{error}: {source}")),
        error => damaged(error.to_string()),
    }
}

fn damaged(message: String) -> Refusal {
    Refusal { code: Code::Damaged, message }
}
