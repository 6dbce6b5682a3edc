"""Nodes and versions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node, as it last said of itself."""

    id: str
    """Its id."""
    accepting: bool = False
    """Whether it takes new sandboxes."""
    live: int = 0
    """Sandboxes that are not ended."""
    max_live: int = 0
    """The most it admits."""
    queued: int = 0
    """Creates waiting for a start slot."""
    cpus: int = 0
    """Cores."""
    memory_bytes: int = 0
    """Memory of the host."""
    memory_available_bytes: int = 0
    """Memory available now."""
    disk_bytes: int = 0
    """Size of the space for writable layers."""
    disk_available_bytes: int = 0
    """Free there."""
    version: str = ""
    """Version of Corral."""


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """Versions of the server."""

    version: str
    """Version of Corral."""
    api: str = ""
    """Version of the API."""
