"""What happened to sandboxes."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from .._errors import ConnectionFailed
from .._lines import EventParser
from .._requests import Request, parse, path, query
from .._retry import Attempts
from .._types import Event, EventPage, decode
from . import _backend
from ._transport import AsyncTransport, chunks


class AsyncEvents:
    """Events in the order of their sequence numbers."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def page(
        self, *, after: int | None = None, sandbox_id: str | None = None, limit: int | None = None
    ) -> EventPage:
        """Events that have happened, from ``after`` on."""
        params = query(after=after, sandbox_id=sandbox_id, limit=limit)
        return decode(EventPage, await self._transport.json(Request("GET", path("events"), params=params)))

    async def follow(self, *, after: int | None = None, sandbox_id: str | None = None) -> AsyncGenerator[Event, None]:
        """Yields events as they happen, for as long as it is iterated; broken connections are resumed."""
        attempts = Attempts(self._transport.retry)
        last = after
        while True:
            headers = {"accept": "text/event-stream"}
            if last is not None:
                headers["last-event-id"] = str(last)
            request = Request(
                "GET",
                path("events"),
                params=query(after=last, sandbox_id=sandbox_id),
                headers=headers,
                read_timeout=None,
            )
            parser = EventParser()
            failure = ConnectionFailed("the stream of events ended", retryable=True)
            try:
                async with self._transport.stream(request) as response:
                    async for chunk in chunks(response, self._transport.endpoint.url):
                        for sent in parser.feed(chunk):
                            data = parse(sent.data.encode())
                            if not isinstance(data, dict) or "seq" not in data:
                                continue
                            event = decode(Event, data)
                            if last is not None and event.seq <= last:
                                continue
                            last = event.seq
                            attempts.progressed()
                            yield event
            except ConnectionFailed as error:
                failure = error
            wait = attempts.wait()
            if wait is None:
                raise failure
            await _backend.sleep(wait)
