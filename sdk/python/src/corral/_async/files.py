"""Files inside a sandbox."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO

from .. import _tar
from .._errors import InvalidRequest, NotFound
from .._lines import EventParser
from .._requests import Request, parse, path, query
from .._retry import Repeat
from .._types import DirectoryPage, FileStatus, WatchEvent, decode
from . import _backend
from ._save import save
from ._transport import AsyncTransport, chunks

_OCTETS = {"content-type": "application/octet-stream"}
_TAR = {"content-type": "application/x-tar"}


class AsyncFiles:
    """Files of one sandbox. Paths are absolute; ``user`` acts with that user's rights inside."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    def _path(self, *more: str) -> str:
        return path("sandboxes", self._sandbox_id, "files", *more)

    async def read(self, file: str, *, user: str | None = None, encoding: str = "utf-8") -> str:
        """A file's content as text."""
        return (await self.read_bytes(file, user=user)).decode(encoding)

    async def read_bytes(
        self, file: str, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> bytes:
        """A file's bytes, or a part of them; none at its end, :class:`InvalidRequest` beyond it."""
        if length == 0:
            return b""
        try:
            return await self._transport.send(self._read_request(file, offset, length, user))
        except InvalidRequest as error:
            if await self._at_end(error, file, offset, user):
                return b""
            raise

    async def _at_end(self, error: InvalidRequest, file: str, offset: int, user: str | None) -> bool:
        return error.kind == "range_not_satisfiable" and (await self.stat(file, user=user)).size_bytes == offset

    def _read_request(self, file: str, offset: int, length: int | None, user: str | None) -> Request:
        headers = {}
        if offset or length is not None:
            headers["range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        return Request("GET", self._path(), params=query(path=file, user=user), headers=headers)

    async def open_read(self, file: str, *, offset: int = 0, user: str | None = None) -> AsyncGenerator[bytes, None]:
        """Yields a file's bytes piece by piece, for files of any size; none at its end."""
        try:
            async with self._transport.stream(self._read_request(file, offset, None, user)) as response:
                async for chunk in chunks(response, self._transport.endpoint.url):
                    yield chunk
        except InvalidRequest as error:
            if not await self._at_end(error, file, offset, user):
                raise

    async def write(
        self,
        file: str,
        data: str | bytes,
        *,
        mode: int | None = None,
        parents: bool = False,
        user: str | None = None,
    ) -> FileStatus:
        """Writes a file in one step: readers see the old content or the new, never a part."""
        raw = data.encode() if isinstance(data, str) else bytes(data)

        async def body() -> AsyncIterator[bytes]:
            view = memoryview(raw)
            for start in range(0, len(raw), 1 << 20):
                yield bytes(view[start : start + (1 << 20)])

        return await self._put(file, body, mode, parents, user, {"content-length": str(len(raw))})

    async def _put(
        self,
        file: str,
        body: Callable[[], AsyncIterator[bytes]],
        mode: int | None,
        parents: bool,
        user: str | None,
        headers: dict[str, str],
    ) -> FileStatus:
        request = Request(
            "PUT",
            self._path(),
            params=query(path=file, user=user, mode=mode, parents=True if parents else None),
            body=body,
            headers=_OCTETS | headers,
            read_timeout=600,
        )
        return decode(FileStatus, await self._transport.json(request))

    async def upload(
        self,
        source: str | os.PathLike[str],
        file: str,
        *,
        mode: int | None = None,
        parents: bool = False,
        user: str | None = None,
    ) -> FileStatus:
        """Copies a local file in, of any size in constant memory. Its permission bits go with it."""
        size = os.stat(source)
        mode = size.st_mode & 0o777 if mode is None else mode
        return await self._put(file, lambda: _backend.from_iterator(lambda: _tar.read(source)), mode, parents, user, {})

    async def download(self, file: str, target: str | os.PathLike[str], *, user: str | None = None) -> Path:
        """Copies a file out, of any size in constant memory; the target appears when it is whole."""
        async with aclosing(self.open_read(file, user=user)) as source:
            return await save(source, target)

    async def list(
        self, directory: str, *, depth: int | None = None, limit: int | None = None, user: str | None = None
    ) -> DirectoryPage:
        """A directory's entries, ``depth`` levels deep."""
        params = query(path=directory, depth=depth, limit=limit, user=user)
        return decode(DirectoryPage, await self._transport.json(Request("GET", self._path("list"), params=params)))

    async def stat(self, file: str, *, user: str | None = None) -> FileStatus:
        """What a path names; symbolic links are not followed."""
        params = query(path=file, user=user)
        return decode(FileStatus, await self._transport.json(Request("GET", self._path("stat"), params=params)))

    async def exists(self, file: str, *, user: str | None = None) -> bool:
        """Whether a path names something."""
        try:
            await self.stat(file, user=user)
        except NotFound:
            # The sandbox itself may be what is missing.
            await self._transport.send(Request("GET", path("sandboxes", self._sandbox_id)))
            return False
        return True

    async def mkdir(
        self, directory: str, *, parents: bool = False, mode: int | None = None, user: str | None = None
    ) -> FileStatus:
        """Makes a directory; with ``parents`` also those above it, and an existing one is accepted."""
        body: dict[str, object] = {"path": directory, "parents": parents}
        body |= query(mode=mode, user=user)
        repeat = Repeat.SAFE if parents else Repeat.REFUSED
        request = Request("POST", self._path("mkdir"), json=body, repeat=repeat)
        return decode(FileStatus, await self._transport.json(request))

    async def move(self, source: str, target: str, *, overwrite: bool = False, user: str | None = None) -> FileStatus:
        """Moves a file or directory."""
        body: dict[str, object] = {"from": source, "to": target, "overwrite": overwrite}
        body |= query(user=user)
        request = Request("POST", self._path("move"), json=body, repeat=Repeat.REFUSED)
        return decode(FileStatus, await self._transport.json(request))

    async def remove(self, file: str, *, recursive: bool = False, user: str | None = None) -> None:
        """Removes a file or directory."""
        params = query(path=file, recursive=True if recursive else None, user=user)
        request = Request("DELETE", self._path(), params=params, gone_is_done=True, read_timeout=600)
        await self._transport.send(request)

    async def upload_tar(
        self, directory: str, source: bytes | AsyncIterable[bytes], *, user: str | None = None
    ) -> None:
        """Unpacks a tar stream into a directory."""

        async def body() -> AsyncIterator[bytes]:
            if isinstance(source, bytes):
                yield source
                return
            async for chunk in source:
                yield chunk

        await self._put_tar(directory, body, user, Repeat.SAFE if isinstance(source, bytes) else Repeat.REFUSED)

    async def _put_tar(
        self, directory: str, body: Callable[[], AsyncIterator[bytes]], user: str | None, repeat: Repeat
    ) -> None:
        request = Request(
            "PUT",
            self._path("tar"),
            params=query(path=directory, user=user),
            body=body,
            headers=_TAR,
            repeat=repeat,
            read_timeout=600,
        )
        await self._transport.send(request)

    async def download_tar(self, directory: str, *, user: str | None = None) -> AsyncGenerator[bytes, None]:
        """Yields a directory's content as a tar stream. Its content is the sandbox's: unpack it with care."""
        request = Request("GET", self._path("tar"), params=query(path=directory, user=user), read_timeout=600)
        async with self._transport.stream(request) as response:
            async for chunk in chunks(response, self._transport.endpoint.url):
                yield chunk

    async def upload_dir(self, source: str | os.PathLike[str], directory: str, *, user: str | None = None) -> None:
        """Copies a local directory's content into a directory, which is made where missing."""
        if not await _backend.in_thread(os.path.isdir, source):
            raise NotADirectoryError(f"{source} is not a directory")
        await self.mkdir(directory, parents=True, user=user)
        make = lambda: _backend.from_iterator(lambda: _tar.pack(source))  # noqa: E731
        await self._put_tar(directory, make, user, Repeat.SAFE)

    async def download_dir(
        self, directory: str, target: str | os.PathLike[str], *, user: str | None = None
    ) -> Sequence[str]:
        """Copies a directory's content out and returns the names left out.

        Nothing is written outside ``target``, whatever the sandbox sends: links that lead out, devices and named
        pipes are left out.
        """
        os.makedirs(target, exist_ok=True)
        spool: BinaryIO
        with tempfile.TemporaryFile(dir=target) as spool:
            async with aclosing(self.download_tar(directory, user=user)) as source:
                async for chunk in source:
                    await _backend.in_thread(spool.write, chunk)
            spool.seek(0)
            return await _backend.in_thread(_tar.unpack, spool, target)

    async def watch(
        self, directory: str, *, recursive: bool = False, user: str | None = None
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yields changes below a directory, from the event ``ready`` on, for as long as it is iterated."""
        request = Request(
            "GET",
            self._path("watch"),
            params=query(path=directory, recursive=True if recursive else None, user=user),
            headers={"accept": "text/event-stream"},
            read_timeout=None,
        )
        parser = EventParser()
        async with self._transport.stream(request) as response:
            async for chunk in chunks(response, self._transport.endpoint.url):
                for event in parser.feed(chunk):
                    yield decode(WatchEvent, parse(event.data.encode()))
