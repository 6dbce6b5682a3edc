//! Answering the kernel: the threads that read requests, and reads that have to wait.

use super::Core;
use crate::LayerId;
use crate::control::Event;
use crate::fetch::budget::Lane;
use crate::fetch::{Failure, FetchError, Want, ensure, pass_through, prefetch};
use crate::fuse::MAX_READ;
use crate::fuse::device::Received;
use crate::fuse::wire::{self, Attributes, Request, opcode};
use crate::id::ROOT;
use crate::layer::{Layer, LayerError};
use corral_format::CHUNK;
use rustix::io::Errno;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use tokio::time::Instant;

/// Bytes of the longest request: nothing is written.
const LONGEST: usize = 128 << 10;

/// Answers requests until the file system is unmounted.
pub(super) fn run(core: &Arc<Core>, thread: usize) {
    let mut request = vec![0; LONGEST];
    let mut answer = vec![0; MAX_READ];
    // Touched now: memory that has to be found while the kernel copies would fail the copy of a process that is killed.
    request.fill(1);
    answer.fill(1);
    loop {
        match core.device.receive(&mut request) {
            Ok(Received::Request(length)) => {
                let _at_work = core.pulse.at_work(thread);
                match Request::parse(&request[..length]) {
                    Some(parsed) => handle(core, &parsed, &mut answer),
                    None => tracing::error!(length, "a request is not understood"),
                }
            }
            Ok(Received::Nothing) => {}
            Ok(Received::End) => return,
            Err(error) => {
                tracing::error!(%error, "the connection to the kernel failed");
                return;
            }
        }
    }
}

fn handle(core: &Arc<Core>, request: &Request<'_>, buffer: &mut Vec<u8>) {
    let answered = match request.opcode {
        opcode::READ => read(core, request, buffer),
        opcode::FORGET => {
            core.layers.drop_node(request.node);
            return;
        }
        opcode::BATCH_FORGET => {
            request.forgotten().for_each(|node| core.layers.drop_node(node));
            return;
        }
        opcode::INTERRUPT => {
            interrupt(core, request);
            return;
        }
        _ => other(core, request).map(Some),
    };
    match answered {
        Ok(Some(bytes)) => core.device.answer(request.unique, &bytes),
        Ok(None) => {}
        Err(errno) => core.device.refuse(request.unique, errno),
    }
}

fn other(core: &Core, request: &Request<'_>) -> Result<Vec<u8>, Errno> {
    Ok(match request.opcode {
        opcode::INIT => {
            let (bytes, agreed) = wire::agreed(&request.offer().ok_or(Errno::INVAL)?);
            core.who.agree(&agreed);
            bytes
        }
        opcode::LOOKUP => wire::entry(&lookup(core, request)?),
        opcode::GETATTR if request.node == ROOT => wire::attributes(&directory()),
        opcode::GETATTR => wire::attributes(&file(&*find(core, request.node, None)?)),
        opcode::OPEN => open(core, request)?,
        opcode::RELEASE => {
            release(core, request);
            Vec::new()
        }
        opcode::OPENDIR => wire::opened_directory(),
        opcode::READDIR => list(core, request)?,
        opcode::RELEASEDIR | opcode::DESTROY => Vec::new(),
        opcode::STATFS => wire::file_system(),
        opcode::SETATTR
        | opcode::SYMLINK
        | opcode::MKNOD
        | opcode::MKDIR
        | opcode::UNLINK
        | opcode::RMDIR
        | opcode::RENAME
        | opcode::RENAME2
        | opcode::LINK
        | opcode::WRITE
        | opcode::CREATE
        | opcode::SETXATTR
        | opcode::REMOVEXATTR
        | opcode::FALLOCATE => return Err(Errno::ROFS),
        _ => return Err(Errno::NOSYS),
    })
}

fn directory() -> Attributes {
    Attributes { node: ROOT, size: 0, directory: true }
}

fn file(layer: &Layer) -> Attributes {
    Attributes { node: layer.id.node(), size: layer.manifest.data_len, directory: false }
}

fn find(core: &Core, node: u64, handle: Option<u64>) -> Result<Arc<Layer>, Errno> {
    core.layers.find_node(node, handle).ok_or(Errno::IO)
}

fn lookup(core: &Core, request: &Request<'_>) -> Result<Attributes, Errno> {
    let name = request.name().filter(|_| request.node == ROOT).ok_or(Errno::NOENT)?;
    let id: LayerId = name.parse().map_err(|_| Errno::NOENT)?;
    if name.len() != 64 {
        return Err(Errno::NOENT);
    }
    match core.layers.find(id) {
        Ok(layer) => Ok(file(&layer)),
        Err(LayerError::Unknown(_)) => Err(Errno::NOENT),
        Err(error) => {
            tracing::error!(%error, "a layer cannot be served");
            Err(Errno::IO)
        }
    }
}

fn open(core: &Core, request: &Request<'_>) -> Result<Vec<u8>, Errno> {
    const ACCESS_MODE: u32 = 3;
    if request.open_flags().ok_or(Errno::INVAL)? & ACCESS_MODE != 0 {
        return Err(Errno::ROFS);
    }
    let layer = find(core, request.node, None)?;
    layer.opens.fetch_add(1, Ordering::AcqRel);
    Ok(wire::opened(layer.id.handle()))
}

fn release(core: &Core, request: &Request<'_>) {
    let Some(layer) = core.layers.find_node(request.node, None) else { return };
    // Opens of the process before this one were not counted here.
    let count = |opens: usize| Some(opens.saturating_sub(1));
    let before = layer.opens.fetch_update(Ordering::AcqRel, Ordering::Acquire, count).unwrap_or(0);
    if before <= 1 && layer.forgotten.load(Ordering::Acquire) {
        core.layers.drop_node(request.node);
    }
}

fn list(core: &Core, request: &Request<'_>) -> Result<Vec<u8>, Errno> {
    let (_, offset, size) = request.read().ok_or(Errno::INVAL)?;
    let (mut listing, room) = (Vec::new(), (size as usize).min(MAX_READ));
    let dots = [(".".to_owned(), ROOT, true), ("..".to_owned(), ROOT, true)];
    let files = core.layers.names().into_iter().map(|id| (id.hex(), id.node(), false));
    for (n, (name, node, is_dir)) in dots.into_iter().chain(files).enumerate().skip(offset as usize) {
        if !wire::push_entry(&mut listing, room, node, n as u64 + 1, is_dir, &name) {
            break;
        }
    }
    Ok(listing)
}

/// Someone who waited was killed.
fn interrupt(core: &Core, request: &Request<'_>) {
    let Some(unique) = request.interrupted() else { return };
    let waiting = core.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&unique);
    if let Some(task) = waiting {
        task.abort();
        core.device.refuse(unique, Errno::INTR);
    }
}

/// A read of a layer's data.
struct Read {
    layer: Arc<Layer>,
    unique: u64,
    pid: u32,
    offset: u64,
    length: usize,
    chunks: Range<usize>,
}

/// Answers a read at once, or has it wait and answers nothing yet.
fn read(core: &Arc<Core>, request: &Request<'_>, buffer: &mut Vec<u8>) -> Result<Option<Vec<u8>>, Errno> {
    let (handle, offset, size) = request.read().ok_or(Errno::INVAL)?;
    let layer = find(core, request.node, Some(handle))?;
    let length = layer.manifest.data_len.saturating_sub(offset).min(size.into()) as usize;
    let chunks = layer.chunks_of(offset, length);
    layer.recorders.touch(&chunks);
    layer.touched.note(chunks.clone());
    let cgroup = core.cgroups.of(request.pid);
    if let Some(cgroup) = &cgroup {
        core.cgroups.read(cgroup, length as u64);
    }
    let is_full = layer.map.is_full();
    if is_full && !layer.seen_full.load(Ordering::Relaxed) {
        layer.seen_full.store(true, Ordering::Relaxed);
        core.finish_if_full(&layer);
    }
    let ahead = if is_full || length == 0 { None } else { note(core, &layer, &chunks) };
    if is_full || layer.map.all_present(chunks.clone()) {
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        match layer.read(chunks.clone(), &mut buffer[..length], offset) {
            // Dropped a moment ago.
            Ok(false) => {}
            Ok(true) => {
                layer.stats.hit(length as u64);
                core.device.answer(request.unique, &buffer[..length]);
                if let Some(ahead) = ahead {
                    prefetch::ahead(core, &layer, ahead, cgroup);
                }
                return Ok(None);
            }
            Err(error) => {
                tracing::error!(layer = %layer.id, %error, "data that was here cannot be read");
                layer.map.doubt(chunks.clone());
            }
        }
    }
    layer.stats.miss(length as u64);
    let (unique, pid) = (request.unique, request.pid);
    if let Some(ahead) = ahead {
        prefetch::ahead(core, &layer, ahead, cgroup.clone());
    }
    let read = Read { layer, unique, pid, offset, length, chunks };
    // Entered before the task can end.
    let mut waiting = core.waiting.lock().unwrap_or_else(PoisonError::into_inner);
    let task = core.runtime.spawn(wait(Arc::clone(core), read, cgroup));
    waiting.insert(unique, task.abort_handle());
    Ok(None)
}

/// What to bring ahead of a read.
fn note(core: &Core, layer: &Layer, chunks: &Range<usize>) -> Option<Range<usize>> {
    let most = (core.config.ahead_bytes / CHUNK) as usize;
    layer.streams().note(chunks, layer.manifest.chunks.len(), most)
}

async fn wait(core: Arc<Core>, read: Read, cgroup: Option<Arc<str>>) {
    let deadline = Instant::now() + core.config.wait_limit;
    let want = Want { lane: Lane::Demand, deadline, pid: read.pid, cgroup: cgroup.clone() };
    let mut buffer = Vec::new();
    let (done, _leave) = loop {
        let done = ensure(&core, &read.layer, read.chunks.clone(), &want).await;
        // Never closed.
        let leave = core.answers.acquire().await;
        buffer.resize(read.length, 0);
        let Ok(()) = done else { break (done.map(|()| Ok(())), leave) };
        match read.layer.read(read.chunks.clone(), &mut buffer, read.offset) {
            // Dropped before it was read.
            Ok(false) => {}
            Ok(true) => break (Ok(Ok(())), leave),
            Err(error) => break (Ok(Err(error)), leave),
        }
    };
    let failure = match done {
        Ok(done) => done.err().map(|error| {
            read.layer.map.doubt(read.chunks.clone());
            (read.chunks.start, format!("it cannot be read here: {error}"))
        }),
        // No room is no reason to fail: it is asked for again next time.
        Err(Failure { error, .. }) if matches!(*error, FetchError::Disk { .. }) => {
            let done = gather(&core, &read, &want, &mut buffer).await;
            done.err().map(|error| (error.chunk(), error.to_string()))
        }
        Err(Failure { error, is_new: true }) => Some((error.chunk(), error.to_string())),
        // Told a moment ago.
        Err(Failure { .. }) => {
            read.layer.stats.error();
            core.device.refuse(read.unique, Errno::IO);
            forget(&core, read.unique);
            return;
        }
    };
    match failure {
        None => core.device.answer(read.unique, &buffer),
        Some((chunk, reason)) => refuse(&core, &read, cgroup, chunk as u64, reason),
    }
    forget(&core, read.unique);
}

/// It waits no more.
fn forget(core: &Core, unique: u64) {
    core.waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&unique);
}

/// Puts together what is here and what is not kept.
async fn gather(core: &Core, read: &Read, want: &Want, buffer: &mut [u8]) -> Result<(), FetchError> {
    let layer = &read.layer;
    for number in read.chunks.clone() {
        let chunk = *layer.chunk(number);
        let mut bytes = vec![0; chunk.len as usize];
        let kept = |e: std::io::Error| FetchError::Disk { chunk: number, why: e.to_string() };
        if !layer.read(number..number + 1, &mut bytes, chunk.offset).map_err(kept)? {
            bytes = pass_through(core, layer, number, want).await?;
        }
        // What of it was asked for; the rest of the answer is padding.
        let from = chunk.offset.max(read.offset);
        let to = (chunk.offset + u64::from(chunk.len)).min(read.offset + buffer.len() as u64);
        if from < to {
            let part = &bytes[(from - chunk.offset) as usize..(to - chunk.offset) as usize];
            buffer[(from - read.offset) as usize..(to - read.offset) as usize].copy_from_slice(part);
        }
    }
    Ok(())
}

fn refuse(core: &Core, read: &Read, cgroup: Option<Arc<str>>, chunk: u64, reason: String) {
    read.layer.stats.error();
    tracing::error!(layer = %read.layer.id, chunk, pid = read.pid, reason, "a read fails");
    let cgroup = cgroup.map(|text| text.to_string());
    core.events.push(Event::ReadFailed { layer: read.layer.id, chunk, pid: read.pid, cgroup, reason });
    core.device.refuse(read.unique, Errno::IO);
}
