"""Streams of text that arrive in arbitrary pieces: lines (NDJSON) and server-sent events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


class LineSplitter:
    """Cuts chunks of bytes into lines without their ends."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that are complete with this chunk."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")

    def rest(self) -> bytes:
        """What came after the last line's end."""
        rest, self._rest = self._rest, b""
        return rest


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event of a ``text/event-stream``."""

    event: str
    data: str
    id: str | None


class EventParser:
    """Parses server-sent events as the HTML standard has them."""

    def __init__(self) -> None:
        self._lines = LineSplitter()
        self._data: list[str] = []
        self._event = ""
        self.last_id: str | None = None

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        """The events that are complete with this chunk."""
        for raw in self._lines.feed(chunk):
            line = raw.decode("utf-8", "replace")
            if not line:
                if self._data:
                    yield ServerSentEvent(self._event or "message", "\n".join(self._data), self.last_id)
                self._data, self._event = [], ""
                continue
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                self._data.append(value)
            elif name == "event":
                self._event = value
            elif name == "id" and "\0" not in value:
                self.last_id = value
