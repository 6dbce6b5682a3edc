"""What the two clients do differently: waiting, threads, HTTP and WebSocket transports."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import httpx
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as _connect

T = TypeVar("T")

__all__ = ["ClientConnection", "connect", "from_iterator", "http_transport", "in_thread", "merge", "receive", "sleep"]


def sleep(seconds: float) -> None:
    """Waits."""
    time.sleep(seconds)


def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Runs what blocks."""
    return work(*args)


def from_iterator(make: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    """Passes on what an iterator yields."""
    return make()


def http_transport(**options: Any) -> httpx.HTTPTransport:
    """A transport with its own pool of connections."""
    return httpx.HTTPTransport(**options)


def connect(url: str, **options: Any) -> ClientConnection:
    """Opens a WebSocket that its owner closes."""
    opened: ClientConnection = _connect(url, **options).__enter__()
    return opened


def receive(socket: ClientConnection, timeout: float | None) -> str | bytes:
    """The next message of a WebSocket.

    Raises ``TimeoutError`` when none came in time.
    """
    return socket.recv(timeout)


def merge(sources: Sequence[Iterator[T]]) -> Iterator[T]:
    """Items of several iterators as they come.

    Each is drained by a thread. When the caller leaves early, a thread ends with the next item of its source.
    """
    items: queue.Queue[tuple[T | None, BaseException | None, bool]] = queue.Queue(16)
    left = threading.Event()

    def put(item: tuple[T | None, BaseException | None, bool]) -> bool:
        while not left.is_set():
            try:
                items.put(item, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False

    def drain(source: Iterator[T]) -> None:
        try:
            for item in source:
                if not put((item, None, False)):
                    return
        except Exception as error:
            put((None, error, True))
        else:
            put((None, None, True))

    for source in sources:
        threading.Thread(target=drain, args=(source,), name="corral-stream", daemon=True).start()
    try:
        running = len(sources)
        while running:
            item, error, ended = items.get()
            if error is not None:
                raise error
            if ended:
                running -= 1
            else:
                yield item  # type: ignore[misc]
    finally:
        left.set()
