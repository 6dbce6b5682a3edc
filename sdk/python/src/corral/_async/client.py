"""The client."""

from __future__ import annotations

import ssl
from types import TracebackType
from typing import Any

import httpx

from .._config import resolve
from .._requests import Request
from .._retry import RetryPolicy
from .._types import VersionInfo, decode
from ._transport import AsyncTransport
from .catalogue import AsyncEnvironments, AsyncImages, AsyncKeys, AsyncLayers, AsyncNodes
from .events import AsyncEvents
from .sandbox import AsyncSandbox
from .sandboxes import AsyncSandboxes


class AsyncClient:
    """A client to one gateway with one key. Make one and share it: it holds the connections.

    ``url`` and ``api_key`` come from ``CORRAL_API_URL`` and ``CORRAL_API_KEY`` where absent, else from the file that
    ``corral up`` writes. ``verify`` is a TLS context, or whether to check certificates. The soft limit of open files is
    raised to what ``max_connections`` needs, within the hard limit; requests beyond either wait for a connection.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        retry: RetryPolicy | None = None,
        max_connections: int = 4000,
        connect_timeout: float = 10.0,
        verify: ssl.SSLContext | bool = True,
        http_transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._transport = AsyncTransport(
            resolve(url, api_key),
            retry=retry or RetryPolicy(),
            max_connections=max_connections,
            connect_timeout=connect_timeout,
            verify=verify,
            http_transport=http_transport,
        )
        self.sandboxes = AsyncSandboxes(self._transport)
        """Sandboxes: create, get, list."""
        self.images = AsyncImages(self._transport)
        """Images: import, list, get, delete."""
        self.layers = AsyncLayers(self._transport)
        """Layers: build, list, delete."""
        self.environments = AsyncEnvironments(self._transport)
        """Named environments."""
        self.events = AsyncEvents(self._transport)
        """What happened to sandboxes."""
        self.keys = AsyncKeys(self._transport)
        """API keys."""
        self.nodes = AsyncNodes(self._transport)
        """Nodes."""

    @property
    def url(self) -> str:
        """Where the gateway is."""
        return self._transport.endpoint.url

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    def sandbox(self, sandbox_id: str) -> AsyncSandbox:
        """A handle on a sandbox by its id, without asking whether there is one."""
        from .._types import SandboxStatus, State

        return AsyncSandbox(self._transport, SandboxStatus(id=sandbox_id, state=State("unknown")))

    async def version(self) -> VersionInfo:
        """Versions of the server."""
        return decode(VersionInfo, await self._transport.json(Request("GET", "/version")))

    async def request(self, method: str, path: str, *, json: Any = None, params: Any = None) -> Any:
        """Sends a request that this version has no method for, and returns the JSON answer."""
        return await self._transport.json(Request(method, path, json=json, params=params or {}))

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._transport.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
