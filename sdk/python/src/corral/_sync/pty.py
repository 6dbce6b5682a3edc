"""Terminals over WebSocket."""

# Made from ../_async by tools/unasync.py; do not edit.

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from .._errors import ConnectionFailed, CorralError
from .._requests import answer_error, path, query
from .._types import Outcome, decode_outcome
from . import _backend
from ._transport import Transport


class Pty:
    """A program on a terminal. Leaving it closes the connection; the program runs on.

    Come back with ``sandbox.pty(command_id=pty.command_id, offset=pty.offset)``.
    """

    def __init__(self, socket: _backend.ClientConnection, command_id: str | None, offset: int) -> None:
        self._socket = socket
        self.command_id = command_id
        """The command on the terminal, to come back to."""
        self.offset = offset
        """Offset of the next byte that :meth:`receive` returns."""
        self.outcome: Outcome | None = None
        """How the program ended, once it did."""
        self.exit_code: int | None = None
        """Exit status as a shell reports it, once it ended."""

    @classmethod
    def open(
        cls,
        transport: Transport,
        sandbox_id: str,
        *,
        argv: Sequence[str] | None,
        cwd: str | None,
        user: str | None,
        cols: int,
        rows: int,
        command_id: str | None,
        offset: int | None,
    ) -> Pty:
        """Starts a program on a terminal, or comes back to one."""
        params = query(cwd=cwd, user=user, cols=cols, rows=rows, command_id=command_id, offset=offset)
        if argv:
            params["argv"] = list(argv)
        url = "ws" + transport.endpoint.url.removeprefix("http")
        url += path("sandboxes", sandbox_id, "pty") + "?" + urlencode(params, doseq=True)
        options: dict[str, Any] = {"ssl": transport.ssl} if transport.ssl is not None else {}
        try:
            socket = _backend.connect(
                url,
                additional_headers={"authorization": f"Bearer {transport.endpoint.key}"},
                open_timeout=transport.connect_timeout + 20,
                max_size=None,
                compression=None,
                proxy=None if transport.endpoint.is_loopback else True,
                **options,
            )
        except InvalidStatus as error:
            response = error.response
            raise answer_error(response.status_code, response.headers, bytes(response.body or b"")) from error
        except (OSError, TimeoutError, InvalidHandshake) as error:
            raise ConnectionFailed(f"no terminal at {transport.endpoint.url}: {error}", retryable=True) from error
        pty = cls(socket, command_id, offset or 0)
        if command_id is None:
            try:
                message = _backend.receive(socket, 60)
            except (ConnectionClosed, TimeoutError) as error:
                socket.close()
                raise ConnectionFailed(f"the terminal broke off before it began: {error}") from error
            if isinstance(message, str):
                pty._control(message)
            else:
                pty._pending = message
        return pty

    _pending: bytes = b""

    def _control(self, text: str) -> None:
        message = json.loads(text)
        if message.get("event") == "started":
            self.command_id = str(message["command_id"])
        elif message.get("event") == "ended":
            self.outcome = decode_outcome(message.get("outcome"))
            self.exit_code = int(message.get("exit_code", 125))

    def receive(self, timeout: float | None = None) -> bytes:
        """The next bytes of the terminal; ``b""`` once the program has ended.

        Raises ``TimeoutError`` when none come in time, and ``ConnectionFailed`` when the connection breaks.
        """
        if self._pending:
            data, self._pending = self._pending, b""
            self.offset += len(data)
            return data
        while self.outcome is None:
            try:
                message = _backend.receive(self._socket, timeout)
            except ConnectionClosed as error:
                raise ConnectionFailed(f"the terminal broke off: {error}", retryable=True) from error
            if isinstance(message, str):
                self._control(message)
            elif message:
                self.offset += len(message)
                return message
        return b""

    def send(self, data: str | bytes) -> None:
        """Types."""
        self._send(data.encode() if isinstance(data, str) else bytes(data))

    def resize(self, cols: int, rows: int) -> None:
        """Gives the terminal another size."""
        self._send(json.dumps({"event": "resize", "cols": cols, "rows": rows}))

    def _send(self, message: str | bytes) -> None:
        try:
            self._socket.send(message)
        except ConnectionClosed as error:
            raise ConnectionFailed(f"the terminal broke off: {error}", retryable=True) from error

    def read_until(self, text: str | bytes, timeout: float = 30) -> bytes:
        """Reads until a text appears, and returns everything up to and with it.

        Raises ``TimeoutError`` when it does not, ``CorralError`` when the program ends before.
        """
        wanted = text.encode() if isinstance(text, str) else bytes(text)
        seen = b""
        while wanted not in seen:
            chunk = self.receive(timeout)
            if not chunk:
                raise CorralError(f"the program ended before {wanted!r} appeared; it wrote {seen[-500:]!r}")
            seen += chunk
        return seen

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self.receive():
            yield chunk

    def close(self) -> None:
        """Closes the connection. The program runs on."""
        self._socket.close()

    def __enter__(self) -> Pty:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
