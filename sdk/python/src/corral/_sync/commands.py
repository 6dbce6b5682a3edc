"""Commands that run in the background."""

# Made from ../_async by tools/unasync.py; do not edit.

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing

from .._errors import Conflict, ConnectionFailed
from .._requests import Request, checked, path, query
from .._retry import Attempts, Repeat
from .._types import (
    CommandStatus,
    ExecResult,
    OutputChunk,
    StreamStatus,
    decode,
    decode_result,
)
from . import _backend
from ._transport import Transport, chunks

_WAIT = 30.0
"""Longest time one request waits for a command's end."""


class Command:
    """A command of a sandbox, running or ended.

    A handle holds nothing open: it can be made anew from the ids with ``sandbox.command(command_id)``.
    """

    def __init__(self, transport: Transport, sandbox_id: str, status: CommandStatus) -> None:
        self._transport = transport
        self.sandbox_id = sandbox_id
        self.status = status
        """As it was when last asked for."""

    def __repr__(self) -> str:
        state = "running" if self.status.running else "ended"
        return f"<{type(self).__name__} {self.id} of {self.sandbox_id}, {state}>"

    @property
    def id(self) -> str:
        """Its id."""
        return self.status.id

    def _path(self, *more: str) -> str:
        return path("sandboxes", self.sandbox_id, "commands", self.id, *more)

    def refresh(self) -> CommandStatus:
        """Asks how far it is."""
        self.status = decode(CommandStatus, self._transport.json(Request("GET", self._path())))
        return self.status

    def wait(self, timeout: float | None = None) -> CommandStatus:
        """Waits for its end. The command goes on when the waiting ends with ``TimeoutError``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _WAIT if deadline is None else min(_WAIT, max(0.0, deadline - time.monotonic()))
            request = Request("GET", self._path(), params={"wait_ms": int(left * 1000)}, read_timeout=_WAIT + 60)
            self.status = decode(CommandStatus, self._transport.json(request))
            if not self.status.running:
                return self.status
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"command {self.id} still runs after {timeout} s")

    def result(self, *, check: bool = False) -> ExecResult:
        """Waits for its end and reads everything that was kept of its output.

        With ``check``, raises ``CommandFailed`` or ``CommandTimeout`` unless it exited with 0.
        """
        self.wait()
        result = decode_result(self._transport.json(Request("GET", self._path("result"))))
        self.status = result.command
        return checked(self.complete(result), check)

    def complete(self, result: ExecResult) -> ExecResult:
        """Reads what was too long to come inside the result."""
        out = self._rest("stdout", result.stdout_bytes, result.command.stdout)
        err = self._rest("stderr", result.stderr_bytes, result.command.stderr)
        if out is result.stdout_bytes and err is result.stderr_bytes:
            return result
        return ExecResult(result.exit_code, out, err, result.command)

    def _rest(self, stream: str, inline: bytes, status: StreamStatus) -> bytes:
        if len(inline) >= status.kept_bytes:
            return inline
        # Both what came inline and this read jump over the gap in the same place.
        return self._read(stream, status)

    def _read(self, stream: str, status: StreamStatus) -> bytes:
        parts = []
        with closing(self._follow(stream, 0, status)) as source:
            for chunk in source:
                parts.append(chunk.data)
        return b"".join(parts)

    def output(self, stream: str = "stdout") -> bytes:
        """Everything kept of a stream so far."""
        status = self.refresh()
        return self._read(stream, status.stdout if stream == "stdout" else status.stderr)

    def signal(self, signal: str | int, *, tree: bool = False) -> None:
        """Sends a signal (``SIGTERM``, ``15``) to its first process, or to everything it started."""
        body = {"signal": str(signal), "tree": tree}
        self._transport.send(Request("POST", self._path("signal"), json=body, repeat=Repeat.REFUSED))

    def kill(self) -> None:
        """Kills everything it started. A command that has ended is left as it is."""
        body = {"signal": "SIGKILL", "tree": True}
        try:
            self._transport.send(Request("POST", self._path("signal"), json=body, repeat=Repeat.SAFE))
        except Conflict:
            if (self.refresh()).running:
                raise

    def write_stdin(self, data: str | bytes = b"", *, close: bool = False) -> None:
        """Writes to its standard input, which ``open_stdin=True`` kept open; waits while its pipe is full."""
        raw = data.encode() if isinstance(data, str) else bytes(data)

        def body() -> Iterator[bytes]:
            for start in range(0, len(raw), 256 << 10):
                yield raw[start : start + (256 << 10)]

        request = Request(
            "POST",
            self._path("stdin"),
            params=query(close=True if close else None),
            body=body,
            headers={"content-type": "application/octet-stream"},
            repeat=Repeat.REFUSED,
            read_timeout=None,
        )
        self._transport.send(request)

    def close_stdin(self) -> None:
        """Closes its standard input."""
        self.write_stdin(b"", close=True)

    def stream(self, stream: str | None = None, *, offset: int = 0) -> Generator[OutputChunk, None, None]:
        """Yields output as it comes, until the command ends; broken connections are resumed without loss.

        ``stream`` is ``"stdout"``, ``"stderr"``, or None for both, each in its order. ``offset`` starts there.
        """
        names = [stream] if stream is not None else ["stdout", "stderr"]
        sources = [self._follow(name, offset, None) for name in names]
        merged = sources[0] if len(sources) == 1 else _backend.merge(sources)
        for chunk in merged:
            yield chunk

    def _follow(self, stream: str, offset: int, until: StreamStatus | None) -> Generator[OutputChunk, None, None]:
        """Reads a stream from an offset to its end, or to where it was at ``until``."""
        attempts = Attempts(self._transport.retry)
        at = offset
        barren = False
        while until is None or at < until.total_bytes:
            before = at
            limit = None if until is None else until.total_bytes - at
            request = Request(
                "GET",
                self._path("output"),
                params=query(stream=stream, offset=at, limit=limit, follow=True if until is None else None),
                read_timeout=None if until is None else 120,
            )
            broken: ConnectionFailed | None = None
            try:
                with self._transport.stream(request) as response:
                    # An answer ends where bytes were dropped, and the next one begins behind the gap.
                    at = max(at, int(response.headers.get("corral-offset", at)))
                    for data in chunks(response, self._transport.endpoint.url):
                        yield OutputChunk(stream, at, data)
                        at += len(data)
            except ConnectionFailed as error:
                broken = error
            if at > before:
                attempts.progressed()
            if broken is not None:
                wait = attempts.wait()
                if wait is None:
                    raise broken
                _backend.sleep(wait)
                continue
            if until is not None:
                if at == before:
                    return
                continue
            status = self.refresh()
            total = (status.stdout if stream == "stdout" else status.stderr).total_bytes
            if not status.running and (at >= total or (barren and at == before)):
                return
            barren = at == before
            if barren:
                # A server that drains ends streams early: come back, but not in a tight loop.
                _backend.sleep(0.2)
