//! Bringing chunks that were claimed: read, unpack, check, write, mark.

use super::budget::Lane;
use super::runs::{self, Placed, Side};
use super::source::SourceError;
use super::{FetchError, Want};
use crate::control::Event;
use crate::layer::Layer;
use crate::layer::flights::{Claim, Flights};
use crate::layer::map::State;
use crate::server::Core;
use bytes::Bytes;
use corral_format::CHUNK;
use corral_format::places::Places;
use corral_format::unpack::Unpacker;
use corral_store::Key;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

/// How often a chunk is fetched that comes wrong.
const TRIES: u32 = 3;

/// Brings chunks that a reader waits for, each claim to its end, and what lies around them.
pub(crate) async fn bring(core: Arc<Core>, layer: Arc<Layer>, claims: Vec<Claim>, want: Want) {
    let mut claims = look_here_first(&layer, claims).await;
    if claims.is_empty() {
        core.finish_if_full(&layer);
        return;
    }
    let places = match places(&core, &layer, want.deadline, None).await {
        Ok(places) => places,
        Err(error) => return fail_all(claims, &error, &want),
    };
    claims.extend(neighbours(&layer, &places, &claims, core.config.around_bytes));
    let placed = claims.into_iter().map(|item| Placed { place: places.chunks[item.chunk], item }).collect();
    let mut runs = runs::group(placed, core.budget.run_bytes(want.lane));
    // The last one in this task: most often it is the only one.
    let last = runs.pop();
    for run in runs {
        let (core, layer, places, want) = (Arc::clone(&core), Arc::clone(&layer), Arc::clone(&places), want.clone());
        tokio::spawn(async move {
            let _leave = core.budget.take(want.lane, bytes_of(&run)).await;
            carry(&core, &layer, &places, run, &want).await;
        });
    }
    if let Some(run) = last {
        let _leave = core.budget.take(want.lane, bytes_of(&run)).await;
        carry(&core, &layer, &places, run, &want).await;
    }
}

/// Brings chunks that nobody waits for. What waits for its turn is not claimed: a reader that comes meanwhile does not
/// wait with it.
pub(crate) async fn bring_later(core: Arc<Core>, layer: Arc<Layer>, chunks: Vec<usize>, want: Want) {
    let Ok(places) = places(&core, &layer, want.deadline, None).await else { return };
    let missing = chunks.into_iter().filter(|chunk| layer.map.state(*chunk) != State::Present);
    let placed = missing.map(|item| Placed { place: places.chunks[item], item }).collect();
    let mut tasks = JoinSet::new();
    for run in runs::group(placed, core.budget.run_bytes(want.lane)) {
        let (core, layer, places, want) = (Arc::clone(&core), Arc::clone(&layer), Arc::clone(&places), want.clone());
        tasks.spawn(async move {
            let bytes = run.iter().map(|c| u64::from(c.place.stored).min(CHUNK)).sum::<u64>() + CHUNK;
            let _leave = core.budget.take(want.lane, bytes).await;
            let chunks: Vec<usize> = run.iter().map(|c| c.item).collect();
            let claims = look_here_first(&layer, Flights::claim_free(&layer, &chunks)).await;
            let placed = claims.into_iter().map(|item| Placed { place: places.chunks[item.chunk], item }).collect();
            // What a reader took out of the middle leaves two.
            for run in runs::group(placed, bytes) {
                carry(&core, &layer, &places, run, &want).await;
            }
            core.finish_if_full(&layer);
        });
    }
    while tasks.join_next().await.is_some() {}
}

/// Claims what lies around chunks that are to be read, up to what somebody has or brings. Most often it is asked for
/// next (a directory of small files, a part of a library), and an answer from far away takes long however short it is:
/// replayed over the first reads of twenty images' tasks, the usual width takes a quarter of the requests for half more
/// bytes.
fn neighbours(layer: &Arc<Layer>, places: &Places, claims: &[Claim], around: u64) -> Vec<Claim> {
    let mut found = Vec::new();
    for claim in claims {
        for (side, most) in [(Side::Before, around / 2), (Side::Behind, around)] {
            found.extend(Flights::claim_next(layer, runs::beside(&places.chunks, claim.chunk, side, most)));
        }
    }
    found
}

fn bytes_of(run: &[Placed<Claim>]) -> u64 {
    // One chunk is unpacked at a time.
    run.iter().map(|c| u64::from(c.place.stored).min(CHUNK)).sum::<u64>() + CHUNK
}

/// Settles the claims of chunks that may be here, and are.
async fn look_here_first(layer: &Arc<Layer>, claims: Vec<Claim>) -> Vec<Claim> {
    if claims.iter().all(|c| layer.map.state(c.chunk) == State::Absent) {
        return claims;
    }
    let layer = Arc::clone(layer);
    let look = move || {
        let (mut left, mut buffer) = (Vec::new(), Vec::new());
        for claim in claims {
            if layer.look_at(claim.chunk, &mut buffer) {
                claim.land();
            } else {
                left.push(claim);
            }
        }
        left
    };
    tokio::task::spawn_blocking(look).await.unwrap_or_default()
}

/// Brings what lies together, and then one by one what was wrong.
async fn carry(core: &Arc<Core>, layer: &Arc<Layer>, places: &Arc<Places>, run: Vec<Placed<Claim>>, want: &Want) {
    let wrong = match read(core, layer, places, &numbered(&run), want).await {
        Ok(bytes) => unpack(layer, run, bytes).await,
        Err(late @ SourceError::Late(_)) => return fail_all(run.into_iter().map(|c| c.item).collect(), &late, want),
        // One of them may be the cause.
        Err(SourceError::Final(_)) => run.into_iter().map(|c| c.item).collect(),
    };
    for claim in wrong {
        insist(core, layer, places, claim, want).await;
    }
    core.finish_if_full(layer);
}

/// Brings a chunk that came wrong once; the last time from where the store's own table says.
async fn insist(core: &Arc<Core>, layer: &Arc<Layer>, places: &Arc<Places>, mut claim: Claim, want: &Want) {
    let chunk = claim.chunk;
    let mut places = Arc::clone(places);
    let mut refusal = None;
    for attempt in 2..=TRIES {
        if attempt == TRIES {
            // Its own fault is found by what comes next.
            places = self::places(core, layer, want.deadline, Some(&places)).await.unwrap_or(places);
        }
        let mut run = vec![Placed { place: places.chunks[chunk], item: claim }];
        match read(core, layer, &places, &numbered(&run), want).await {
            Ok(bytes) => {
                refusal = None;
                let mut wrong = unpack(layer, run, bytes).await;
                let Some(left) = wrong.pop() else { return };
                claim = left;
            }
            Err(late @ SourceError::Late(_)) => {
                return fail_all(run.into_iter().map(|c| c.item).collect(), &late, want);
            }
            Err(SourceError::Final(why)) => {
                refusal = Some(why);
                let Some(left) = run.pop() else { return };
                claim = left.item;
            }
        }
    }
    let remember = remembered(want);
    if let Some(why) = refusal {
        return claim.fail(FetchError::Refused { chunk, why }, remember);
    }
    tracing::error!(layer = %layer.id, chunk, "the store has a damaged chunk");
    let pack = places.packs.get(places.chunks[chunk].pack as usize);
    let pack = pack.map(|name| data_encoding::HEXLOWER.encode(name)).unwrap_or_default();
    core.events.push(Event::CorruptChunk { layer: layer.id, chunk: chunk as u64, pack, tries: TRIES });
    claim.fail(FetchError::Corrupt { chunk, tries: TRIES }, remember);
}

/// A chunk for one reader, not kept: where there is no room for it.
pub(crate) async fn pass_through(
    core: &Core,
    layer: &Arc<Layer>,
    chunk: usize,
    want: &Want,
) -> Result<Vec<u8>, FetchError> {
    let failed = |error| match error {
        SourceError::Late(why) => FetchError::Late { chunk, why },
        SourceError::Final(why) => FetchError::Refused { chunk, why },
    };
    let places = places(core, layer, want.deadline, None).await.map_err(failed)?;
    let place = places.chunks[chunk];
    let _leave = core.budget.take(want.lane, u64::from(place.stored).min(CHUNK) + CHUNK).await;
    for _ in 0..TRIES {
        let run = [Placed { item: chunk, place }];
        let bytes = read(core, layer, &places, &run, want).await.map_err(failed)?;
        let mut buffer = Vec::new();
        if Unpacker::default().unpack(layer.chunk(chunk), place, &bytes, &mut buffer).is_ok() {
            return Ok(buffer);
        }
        layer.stats.wrong_answer();
    }
    Err(FetchError::Corrupt { chunk, tries: TRIES })
}

fn numbered(run: &[Placed<Claim>]) -> Vec<Placed<usize>> {
    run.iter().map(|c| Placed { item: c.item.chunk, place: c.place }).collect()
}

/// Reads the bytes of chunks that lie behind each other.
async fn read(
    core: &Core,
    layer: &Layer,
    places: &Places,
    run: &[Placed<usize>],
    want: &Want,
) -> Result<Bytes, SourceError> {
    let unsound = || SourceError::Final("its place cannot be".to_owned());
    let (Some(first), Some(last)) = (run.first(), run.last()) else { return Ok(Bytes::new()) };
    if !run.iter().all(|c| runs::is_sound(c.place)) {
        return Err(unsound());
    }
    let name = places.packs.get(first.place.pack as usize).ok_or_else(unsound)?;
    let name = data_encoding::HEXLOWER.encode(name);
    let key = Key::parse(format!("packs/{}/{name}", &name[..2])).map_err(|_| unsound())?;
    let range = first.place.offset..last.place.offset + u64::from(last.place.stored);
    let begin = Instant::now();
    let bytes = core.source.get_range(&key, range, want.deadline).await?;
    let raw: u64 = run.iter().map(|c| u64::from(layer.chunk(c.item).len)).sum();
    layer.stats.fetched(bytes.len() as u64, raw, begin.elapsed(), want.lane);
    if let Some(cgroup) = &want.cgroup {
        core.cgroups.fetched(cgroup, bytes.len() as u64, raw);
    }
    Ok(bytes)
}

/// Takes chunks out of what was read; gives back the claims of those that are wrong.
async fn unpack(layer: &Arc<Layer>, run: Vec<Placed<Claim>>, bytes: Bytes) -> Vec<Claim> {
    // Small enough to be done at once; more would hold up other tasks of this thread.
    const AT_ONCE: usize = 2;
    if run.len() <= AT_ONCE {
        return unpack_now(layer, run, &bytes);
    }
    let layer = Arc::clone(layer);
    tokio::task::spawn_blocking(move || unpack_now(&layer, run, &bytes)).await.unwrap_or_default()
}

fn unpack_now(layer: &Layer, run: Vec<Placed<Claim>>, bytes: &[u8]) -> Vec<Claim> {
    let begin = run.first().map_or(0, |c| c.place.offset);
    let (mut wrong, mut buffer) = (Vec::new(), Vec::with_capacity(CHUNK as usize));
    let mut unpacker = Unpacker::default();
    for Placed { item: claim, place } in run {
        let chunk = layer.chunk(claim.chunk);
        let from = (place.offset - begin) as usize;
        let stored = bytes.get(from..from + place.stored as usize);
        if stored.is_none_or(|stored| unpacker.unpack(chunk, place, stored, &mut buffer).is_err()) {
            layer.stats.wrong_answer();
            wrong.push(claim);
            continue;
        }
        match layer.write(claim.chunk, &mut buffer) {
            Ok(()) => claim.land(),
            Err(error) => {
                tracing::warn!(layer = %layer.id, %error, "a chunk cannot be kept");
                let failure = FetchError::Disk { chunk: claim.chunk, why: error.to_string() };
                claim.fail(failure, Some(0));
            }
        }
    }
    wrong
}

/// Where the layer's chunks lie: from here, or from the store where these are missing or led nowhere.
async fn places(
    core: &Core,
    layer: &Arc<Layer>,
    until: Instant,
    wrong: Option<&Arc<Places>>,
) -> Result<Arc<Places>, SourceError> {
    let mut kept = layer.places.lock().await;
    match (&*kept, wrong) {
        (Some(places), None) => return Ok(Arc::clone(places)),
        // Another chunk's turn has replaced it.
        (Some(places), Some(wrong)) if !Arc::ptr_eq(places, wrong) => return Ok(Arc::clone(places)),
        _ => {}
    }
    if wrong.is_none() {
        let at = Arc::clone(layer);
        if let Ok(Some(places)) = tokio::task::spawn_blocking(move || at.local_places()).await {
            return Ok(Arc::clone(kept.insert(Arc::new(places))));
        }
    }
    let refused = |why: String| SourceError::Final(why);
    let key = Key::parse(format!("layers/{}/places", layer.id)).map_err(|e| refused(e.to_string()))?;
    let chunks = layer.manifest.chunks.len();
    let mut tries = 0;
    loop {
        let frame = core.source.get(&key, 4096 + chunks as u64 * 48, until).await?;
        match Places::unpack(&frame, chunks) {
            Ok(places) => return Ok(Arc::clone(kept.insert(Arc::new(places)))),
            Err(error) if tries >= TRIES => return Err(refused(error.to_string())),
            Err(_) => tries += 1,
        }
        sleep(Duration::from_millis(10)).await;
    }
}

fn fail_all(claims: Vec<Claim>, error: &SourceError, want: &Want) {
    for claim in claims {
        let chunk = claim.chunk;
        let error = match error.clone() {
            SourceError::Late(why) => FetchError::Late { chunk, why },
            SourceError::Final(why) => FetchError::Refused { chunk, why },
        };
        claim.fail(error, remembered(want));
    }
}

/// For whom a failure is remembered: what nobody waited for is tried again by whoever does.
fn remembered(want: &Want) -> Option<u32> {
    (want.lane == Lane::Demand).then_some(want.pid)
}
