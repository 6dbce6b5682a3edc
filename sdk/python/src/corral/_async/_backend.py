"""What the two clients do differently: waiting, threads, HTTP and WebSocket transports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeVar

import httpx
from websockets.asyncio.client import ClientConnection, connect

T = TypeVar("T")

__all__ = ["ClientConnection", "connect", "from_iterator", "http_transport", "in_thread", "merge", "receive", "sleep"]


async def sleep(seconds: float) -> None:
    """Waits."""
    await asyncio.sleep(seconds)


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Runs what blocks without holding up the loop."""
    return await asyncio.to_thread(work, *args)


async def from_iterator(make: Callable[[], Iterator[bytes]]) -> AsyncIterator[bytes]:
    """Passes on what a blocking iterator yields."""
    chunks = make()
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk


def http_transport(**options: Any) -> httpx.AsyncHTTPTransport:
    """A transport with its own pool of connections."""
    return httpx.AsyncHTTPTransport(**options)


async def receive(socket: ClientConnection, timeout: float | None) -> str | bytes:
    """The next message of a WebSocket.

    Raises ``TimeoutError`` when none came in time.
    """
    try:
        return await asyncio.wait_for(socket.recv(), timeout)
    except asyncio.TimeoutError:
        raise TimeoutError("no message in time") from None


async def merge(sources: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Items of several iterators as they come."""
    queue: asyncio.Queue[tuple[T | None, BaseException | None, bool]] = asyncio.Queue(16)

    async def drain(source: AsyncIterator[T]) -> None:
        try:
            async for item in source:
                await queue.put((item, None, False))
        except Exception as error:
            await queue.put((None, error, True))
        else:
            await queue.put((None, None, True))

    tasks = [asyncio.create_task(drain(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            item, error, ended = await queue.get()
            if error is not None:
                raise error
            if ended:
                running -= 1
            else:
                yield item  # type: ignore[misc]
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
