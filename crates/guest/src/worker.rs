//! One operation for the node, over the socket the keeper placed.

use crate::protocol::{Kind, MAX_PAYLOAD, Op, OpError, OpErrorKind, Outcome, WireStatus, read_frame, write_frame};
use crate::{archive, files, trees, watch};
use corral_api::files::FileStatus;
use std::os::unix::net::UnixStream;

/// Number of the socket; the keeper's `spawn::WORKER_FD`.
const SOCKET_FD: i32 = 3;

/// Does the operation and ends the process.
pub fn run() -> ! {
    let code = match corral_sys::process::inherited_fd(SOCKET_FD) {
        Some(socket) => serve(&mut UnixStream::from(socket)),
        None => 2,
    };
    std::process::exit(code)
}

fn serve(socket: &mut UnixStream) -> i32 {
    let mut payload = Vec::new();
    let Ok(Some(Kind::Request)) = read_frame(socket, &mut payload) else { return 2 };
    let Ok(op) = postcard::from_bytes::<Op>(&payload) else { return 2 };
    match perform(op, socket) {
        Ok(()) => 0,
        Err(_) => 1,
    }
}

fn perform(op: Op, socket: &mut UnixStream) -> std::io::Result<()> {
    let status = match op {
        Op::Read { path, offset, limit } => match files::open_for_read(&path, |_| offset) {
            Ok((file, status)) => {
                answer(socket, &Ok(Some(status.into())))?;
                return files::send(file, limit, socket);
            }
            Err(error) => Err(error),
        },
        Op::ReadEnd { path, bytes } => match files::open_for_read(&path, |size| size.saturating_sub(bytes)) {
            Ok((file, status)) => {
                answer(socket, &Ok(Some(status.into())))?;
                return files::send(file, Some(bytes), socket);
            }
            Err(error) => Err(error),
        },
        Op::Write { path, mode, parents } => files::write(&path, mode, parents, socket).map(Some),
        Op::Stat { path } => files::stat(&path).map(Some),
        Op::List { path, depth, limit } => match files::list(&path, depth, limit) {
            Ok((entries, truncated)) => {
                answer(socket, &Ok(None))?;
                return send_entries(entries, truncated, socket);
            }
            Err(error) => Err(error),
        },
        Op::Mkdir { path, parents, mode } => files::mkdir(&path, parents, mode).map(Some),
        Op::Move { from, to, overwrite } => files::rename(&from, &to, overwrite).map(Some),
        Op::Remove { path, recursive } => trees::remove(&path, recursive).map(|()| None),
        Op::TarOut { path } => match files::stat(&path) {
            Ok(status) => {
                answer(socket, &Ok(Some(status.into())))?;
                // After the first byte a failure shows as a stream without its end; the node is told why.
                return match archive::send(&path, socket) {
                    Ok(()) => Ok(()),
                    Err(error) => answer(socket, &Err(error)),
                };
            }
            Err(error) => Err(error),
        },
        Op::TarIn { path, owners } => archive::receive(&path, owners, socket).map(|()| None),
        Op::Watch { path, recursive } => watch::run(&path, recursive, socket).map(|()| None),
    };
    answer(socket, &status.map(|s| s.map(WireStatus::from)))
}

fn answer(socket: &mut UnixStream, outcome: &Outcome) -> std::io::Result<()> {
    let encode = |o: &Outcome| postcard::to_stdvec(o).map_err(std::io::Error::other);
    let mut bytes = encode(outcome)?;
    if bytes.len() > MAX_PAYLOAD {
        bytes = encode(&Err(OpError { kind: OpErrorKind::BadPath, message: "the path is too long".into() }))?;
    }
    write_frame(socket, Kind::Result, &bytes)
}

fn send_entries(entries: Vec<FileStatus>, truncated: bool, socket: &mut UnixStream) -> std::io::Result<()> {
    for entry in entries {
        let bytes = postcard::to_stdvec(&WireStatus::from(entry)).map_err(std::io::Error::other)?;
        write_frame(socket, Kind::Entries, &bytes)?;
    }
    write_frame(socket, Kind::End, &[u8::from(truncated)])
}
