"""The client."""

# Made from ../_async by tools/unasync.py; do not edit.

from __future__ import annotations

import ssl
from types import TracebackType
from typing import Any

import httpx

from .._config import resolve
from .._requests import Request
from .._retry import RetryPolicy
from .._types import VersionInfo, decode
from ._transport import Transport
from .catalogue import Environments, Images, Keys, Layers, Nodes
from .events import Events
from .sandbox import Sandbox
from .sandboxes import Sandboxes


class Client:
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
        http_transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._transport = Transport(
            resolve(url, api_key),
            retry=retry or RetryPolicy(),
            max_connections=max_connections,
            connect_timeout=connect_timeout,
            verify=verify,
            http_transport=http_transport,
        )
        self.sandboxes = Sandboxes(self._transport)
        """Sandboxes: create, get, list."""
        self.images = Images(self._transport)
        """Images: import, list, get, delete."""
        self.layers = Layers(self._transport)
        """Layers: build, list, delete."""
        self.environments = Environments(self._transport)
        """Named environments."""
        self.events = Events(self._transport)
        """What happened to sandboxes."""
        self.keys = Keys(self._transport)
        """API keys."""
        self.nodes = Nodes(self._transport)
        """Nodes."""

    @property
    def url(self) -> str:
        """Where the gateway is."""
        return self._transport.endpoint.url

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    def sandbox(self, sandbox_id: str) -> Sandbox:
        """A handle on a sandbox by its id, without asking whether there is one."""
        from .._types import SandboxStatus, State

        return Sandbox(self._transport, SandboxStatus(id=sandbox_id, state=State("unknown")))

    def version(self) -> VersionInfo:
        """Versions of the server."""
        return decode(VersionInfo, self._transport.json(Request("GET", "/version")))

    def request(self, method: str, path: str, *, json: Any = None, params: Any = None) -> Any:
        """Sends a request that this version has no method for, and returns the JSON answer."""
        return self._transport.json(Request(method, path, json=json, params=params or {}))

    def close(self) -> None:
        """Closes all connections."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
