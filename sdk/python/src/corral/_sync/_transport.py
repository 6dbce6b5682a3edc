"""Sending requests: pools of connections, retries, streams."""

# Made from ../_async by tools/unasync.py; do not edit.

from __future__ import annotations

import socket
import ssl
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from .._config import Endpoint, allow_open_files
from .._errors import ConnectionFailed, CorralError
from .._requests import Request, answer_error, may_repeat, parse
from .._retry import Attempts, Repeat, RetryPolicy
from .._version import __version__
from . import _backend

_PER_POOL = 100
"""Connections of one pool: the time a pool takes for a request grows with their number."""
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]


class _Pool:
    """An HTTP client and the number of requests it carries."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.busy = 0


class Transport:
    """Connections to one gateway, shared by everything a client does."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        retry: RetryPolicy,
        max_connections: int,
        connect_timeout: float,
        verify: ssl.SSLContext | bool,
        http_transport: httpx.BaseTransport | None,
    ) -> None:
        self.endpoint = endpoint
        self.retry = retry
        self.connect_timeout = connect_timeout
        self._max_pools = max(1, -(-max_connections // _PER_POOL))
        self._given = http_transport
        self._pools: list[_Pool] = []
        self.ssl: ssl.SSLContext | None = None
        if endpoint.url.startswith("https:"):
            self.ssl = verify if isinstance(verify, ssl.SSLContext) else httpx.create_ssl_context(verify=verify)
        allow_open_files(max_connections + 256)

    def _pool(self) -> _Pool:
        for pool in self._pools:
            if pool.busy < _PER_POOL:
                return pool
        if self._pools and (self._given is not None or len(self._pools) >= self._max_pools):
            return min(self._pools, key=lambda pool: pool.busy)
        pool = _Pool(self._new_client())
        self._pools.append(pool)
        return pool

    def _new_client(self) -> httpx.Client:
        limits = httpx.Limits(max_connections=_PER_POOL, max_keepalive_connections=_PER_POOL, keepalive_expiry=20)
        transport = self._given or _backend.http_transport(
            verify=self.ssl if self.ssl is not None else False, limits=limits, socket_options=_KEEPALIVE
        )
        return httpx.Client(
            base_url=self.endpoint.url,
            headers={
                "authorization": f"Bearer {self.endpoint.key}",
                "user-agent": f"corral-python/{__version__}",
                "accept-encoding": "identity",
            },
            transport=transport,
            # Work on this machine must not depend on a proxy.
            trust_env=not self.endpoint.is_loopback,
        )

    def _send_once(self, pool: _Pool, request: Request) -> httpx.Response:
        timeout = httpx.Timeout(connect=self.connect_timeout, read=request.read_timeout, write=300, pool=None)
        built = pool.http.build_request(
            request.method,
            request.path,
            params=request.params or None,
            json=request.json,
            content=request.body() if request.body is not None else None,
            headers=request.headers,
            timeout=timeout,
        )
        return pool.http.send(built, stream=True)

    @contextmanager
    def stream(self, request: Request) -> Iterator[httpx.Response]:
        """Sends a request and yields the head of a good answer; its body is read by the caller.

        Raises what the server refuses with, or ``ConnectionFailed``.
        """
        attempts = Attempts(self.retry)
        lost = False
        while True:
            pool = self._pool()
            pool.busy += 1
            try:
                try:
                    response = self._send_once(pool, request)
                except httpx.TransportError as error:
                    sent = not isinstance(error, _NOT_SENT)
                    failure: CorralError = _failed(error, self.endpoint.url)
                    again = failure.retryable and (not sent or request.repeat is Repeat.SAFE)
                    wait = attempts.wait(why=_why(request, failure)) if again else None
                    lost = lost or sent
                else:
                    try:
                        if response.is_success or response.status_code == 304:
                            yield response
                            return
                        if response.status_code == 404 and lost and request.gone_is_done:
                            yield httpx.Response(204, request=response.request)
                            return
                        body = _read_quietly(response)
                    finally:
                        response.close()
                    failure = answer_error(response.status_code, response.headers, body)
                    may = may_repeat(failure, request.repeat)
                    wait = attempts.wait(failure.retry_after, why=_why(request, failure)) if may else None
            finally:
                pool.busy -= 1
            if wait is None:
                raise failure
            _backend.sleep(wait)

    def send(self, request: Request) -> bytes:
        """Sends a request and reads the whole answer."""
        attempts = Attempts(self.retry)
        while True:
            try:
                with self.stream(request) as response:
                    return response.read()
            except httpx.TransportError as error:
                wait = attempts.wait() if request.repeat is Repeat.SAFE else None
                if wait is None:
                    raise _failed(error, self.endpoint.url) from error
            _backend.sleep(wait)

    def json(self, request: Request) -> Any:
        """Sends a request and reads its JSON answer."""
        return parse(self.send(request))

    def close(self) -> None:
        """Closes all connections."""
        pools, self._pools = self._pools, []
        for pool in pools:
            pool.http.close()


def _why(request: Request, failure: CorralError) -> str:
    """For the log: what is sent again, and why."""
    return f"{request.method} {request.path}: {failure}"


def _failed(error: httpx.TransportError, url: str) -> ConnectionFailed:
    text = f"{type(error).__name__} at {url}"
    if str(error):
        text += f": {error}"
    failure = ConnectionFailed(text, retryable=not _is_distrust(error))
    failure.__cause__ = error
    return failure


def _is_distrust(error: BaseException | None) -> bool:
    """Whether the server's certificate was refused: it would be again."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def _read_quietly(response: httpx.Response) -> bytes:
    """The body of a refusal; what breaks off is still a refusal."""
    try:
        return response.read()
    except httpx.TransportError:
        return b""


def chunks(response: httpx.Response, url: str) -> Generator[bytes, None, None]:
    """The body of an answer, piece by piece.

    Raises ``ConnectionFailed`` when it breaks off.
    """
    try:
        for chunk in response.iter_raw():
            if chunk:
                yield chunk
    except httpx.TransportError as error:
        raise _failed(error, url) from error
