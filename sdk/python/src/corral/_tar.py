"""Directories as tar streams. What comes out of a sandbox is hostile until proven otherwise."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

PIECE = 256 << 10
_log = logging.getLogger("corral")


def pack(root: str | os.PathLike[str]) -> Iterator[bytes]:
    """A directory's content as a tar stream in constant memory, sorted by name.

    Sockets are left out, which the log ``corral`` is told once. Raises ``OSError`` that names a file which cannot be
    read or changes meanwhile.
    """
    root = Path(root)
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is not a directory")
    sockets: list[Path] = []
    # It only makes headers and notices hard links; nothing is written to it.
    with open(os.devnull, "wb") as nowhere, tarfile.open(fileobj=nowhere, mode="w|") as headers:
        for path in _walk(root):
            name = path.relative_to(root).as_posix() if path != root else "."
            info: tarfile.TarInfo | None = headers.gettarinfo(path, arcname=name)
            if info is None:  # a socket, which typeshed does not know of
                sockets.append(path)  # type: ignore[unreachable,unused-ignore]
                continue
            if not info.isreg():
                yield _header(info)
                continue
            with open(path, "rb") as file:
                info.size = os.fstat(file.fileno()).st_size
                yield _header(info)
                yield from _whole(file, path)
                yield bytes(-info.size % tarfile.BLOCKSIZE)
    if sockets:
        _log.warning("%d left out, which are sockets, the first of them %s", len(sockets), sockets[0])
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def read(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """A file's bytes. Raises ``OSError`` that names it when it cannot be read or changes meanwhile."""
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        # What the kernel makes up has no length before it is read; neither has a pipe.
        if stat.S_ISREG(found.st_mode) and found.st_size:
            yield from _whole(file, path)
            return
        try:
            while chunk := file.read(PIECE):
                yield chunk
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _whole(file: BinaryIO, path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The bytes of a file as long as it is now.

    Raises ``OSError`` when it changes before they are read: half of it must not be taken for the whole.
    """
    before = os.fstat(file.fileno())
    left = before.st_size
    while left:
        try:
            chunk = file.read(min(PIECE, left))
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        if not chunk:
            raise OSError(errno.EIO, "it became shorter while it was read", os.fspath(path))
        left -= len(chunk)
        yield chunk
    after = os.fstat(file.fileno())
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise OSError(errno.EIO, "it changed while it was read", os.fspath(path))


def _walk(top: Path) -> Iterator[Path]:
    stack = [top]
    while stack:
        path = stack.pop()
        yield path
        if not path.is_symlink() and path.is_dir():
            with os.scandir(path) as entries:
                stack.extend(sorted((Path(e.path) for e in entries), reverse=True))


def unpack(stream: BinaryIO, target: str | os.PathLike[str]) -> list[str]:
    """Unpacks a tar stream below a directory and returns the names left out.

    Nothing is written through a symbolic link, whoever made it; links that lead out, devices and named pipes are left
    out; owners are not taken over and set-user-id bits are dropped.
    """
    os.makedirs(target, exist_ok=True)
    top = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    skipped: list[str] = []
    links: list[tarfile.TarInfo] = []
    modes: dict[tuple[str, ...], int] = {}
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                parts = _parts(member.name)
                if parts is None or (not parts and not member.isdir()):
                    skipped.append(member.name)
                elif member.isdir():
                    if parts and not _make_directory(top, parts):
                        skipped.append(member.name)
                    elif parts:
                        modes[parts] = member.mode & 0o777
                elif member.issym():
                    links.append(member)
                elif member.isreg():
                    data = archive.extractfile(member)
                    if data is None or not _make_file(top, parts, member.mode, data):
                        skipped.append(member.name)
                elif member.islnk():
                    if not _make_hard_link(top, parts, _parts(member.linkname)):
                        skipped.append(member.name)
                else:
                    skipped.append(member.name)
                # tarfile keeps every member it has seen otherwise.
                archive.members = []  # type: ignore[attr-defined]
        for member in links:
            parts = _parts(member.name)
            if parts is None or not _make_symlink(top, parts, member.linkname):
                skipped.append(member.name)
        for parts, mode in sorted(modes.items(), reverse=True):
            with _directory(top, parts[:-1]) as parent:
                if parent is not None and stat.S_ISDIR(_mode(parent, parts[-1])):
                    os.chmod(parts[-1], mode | 0o700, dir_fd=parent)
    finally:
        os.close(top)
    return skipped


def _parts(name: str) -> tuple[str, ...] | None:
    pure = PurePosixPath(name)
    parts = tuple(p for p in pure.parts if p != ".")
    return None if pure.is_absolute() or ".." in parts or "\0" in name else parts


@contextlib.contextmanager
def _directory(top: int, parts: tuple[str, ...], make: bool = False) -> Iterator[int | None]:
    """A directory below ``top``, reached without following links; None where there is none."""
    fd = os.dup(top)
    try:
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=fd)
            deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = deeper
    except OSError as error:
        os.close(fd)
        if error.errno not in {errno.ENOTDIR, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG}:
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _mode(parent: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def _clear(parent: int, name: str) -> bool:
    """Makes room for an entry; a directory stays in the way."""
    if stat.S_ISDIR(_mode(parent, name)):
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
    return True


def _make_directory(top: int, parts: tuple[str, ...]) -> bool:
    with _directory(top, parts, make=True) as made:
        return made is not None


def _make_file(top: int, parts: tuple[str, ...], mode: int, data: BinaryIO | object) -> bool:
    with _directory(top, parts[:-1], make=True) as parent:
        if parent is None or not _clear(parent, parts[-1]):
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = os.open(parts[-1], flags, mode & 0o777 | 0o600, dir_fd=parent)
        with open(fd, "wb") as file:
            while chunk := data.read(PIECE):  # type: ignore[union-attr]
                file.write(chunk)
        return True


def _make_hard_link(top: int, parts: tuple[str, ...], target: tuple[str, ...] | None) -> bool:
    if not target:
        return False
    with _directory(top, parts[:-1], make=True) as parent, _directory(top, target[:-1]) as source:
        if parent is None or source is None or not stat.S_ISREG(_mode(source, target[-1])):
            return False
        if parts == target:
            return True
        if not _clear(parent, parts[-1]):
            return False
        os.link(target[-1], parts[-1], src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        return True


def _make_symlink(top: int, parts: tuple[str, ...], target: str) -> bool:
    if target.startswith("/") or not target:
        return False
    # Only leading "..": after a component that may itself be a link they could lead anywhere.
    steps = PurePosixPath(target).parts
    up = next((n for n, part in enumerate(steps) if part != ".."), len(steps))
    if up > len(parts) - 1 or ".." in steps[up:]:
        return False
    with _directory(top, parts[:-1], make=True) as parent:
        if parent is None or not _clear(parent, parts[-1]):
            return False
        os.symlink(target, parts[-1], dir_fd=parent)
        return True
