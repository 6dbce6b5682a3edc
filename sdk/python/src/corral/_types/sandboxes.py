"""Sandboxes and what they are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ._enums import OpenEnum
from ._wire import milliseconds, to_wire


class State(OpenEnum):
    """Where a sandbox is in its life."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    ENDED = "ended"


class EndReason(OpenEnum):
    """Why a sandbox ended."""

    STOPPED = "stopped"
    IDLE_TTL = "idle_ttl"
    MAX_TTL = "max_ttl"
    JOB_ENDED = "job_ended"
    OOM = "oom"
    DISK_FULL = "disk_full"
    INIT_EXITED = "init_exited"
    KERNEL_PANIC = "kernel_panic"
    POLICY_VIOLATION = "policy_violation"
    EVICTED = "evicted"
    IMAGE_UNAVAILABLE = "image_unavailable"
    START_FAILED = "start_failed"
    STORAGE_ERROR = "storage_error"
    GUEST_AGENT_LOST = "guest_agent_lost"
    MONITOR_LOST = "monitor_lost"
    KEEPER_LOST = "keeper_lost"
    HOST_REBOOTED = "host_rebooted"
    NODE_LOST = "node_lost"
    UNKNOWN = "unknown"


class Cause(OpenEnum):
    """Who brought an end about."""

    AGENT = "agent"
    CLIENT = "client"
    OPERATOR = "operator"
    PLATFORM = "platform"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a sandbox; they hold for everything in it together."""

    memory_mib: int = 512
    """Memory, page cache included."""
    cpus: float = 1.0
    """CPU quota in cores."""
    cpu_weight: int = 100
    """Share of the CPU under contention, 1–10,000."""
    pids: int = 512
    """Processes and threads."""
    open_files: int = 4096
    """Open files of each process."""
    disk_mib: int = 1024
    """Size of the writable layer."""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """A base image and layers on top of it, lowest first."""

    base: str
    """Name or digest of an imported image."""
    workspaces: tuple[str, ...] = ()
    """Digests of workspace layers."""
    toolkits: tuple[str, ...] = ()
    """Digests of toolkit layers, above the workspaces."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of every command, over those of the image."""
    workdir: str | None = None
    """Working directory instead of the image's."""
    user: str | None = None
    """User instead of the image's."""
    entrypoint: tuple[str, ...] | None = None
    """What sandboxes start with instead of the image's entry point and its arguments; empty: nothing."""
    cmd: tuple[str, ...] | None = None
    """Arguments of the entry point instead of the image's."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """A sandbox to create. Times are in seconds, 0 = unlimited."""

    environment: str | None = None
    """Name of an environment or image. Either this, ``image`` or ``spec``."""
    image: str | None = None
    """Name or digest of an image, used without any layers on top."""
    spec: EnvironmentSpec | None = None
    """An environment in place."""
    limits: Limits | Mapping[str, float] | None = None
    """Limits; the server's where absent."""
    env: Mapping[str, str] | None = None
    """Variables of every command."""
    entrypoint: Sequence[str] | None = None
    """What it starts with instead of the environment's entry point and its arguments; empty: nothing."""
    cmd: Sequence[str] | None = None
    """Arguments of the entry point instead of the environment's."""
    labels: Mapping[str, str] | None = None
    """Labels to find it by."""
    hostname: str | None = None
    """Host name inside; the id where absent."""
    idle_ttl: float | None = None
    """Ends after this long without a request."""
    max_ttl: float | None = None
    """Ends this long after its creation."""
    auto_resume: bool = True
    """Requests for commands and files resume it when it is paused."""
    allow_setuid: bool = False
    """Lets set-user-id programs such as sudo gain rights inside."""

    def to_wire(self) -> dict[str, Any]:
        """The body of the request."""
        if sum(x is not None for x in (self.environment, self.image, self.spec)) != 1:
            raise ValueError("give exactly one of environment, image and spec")
        body: dict[str, Any] = {}
        if self.environment is not None:
            body["environment"] = self.environment
        else:
            body["spec"] = to_wire(self.spec or EnvironmentSpec(base=str(self.image)))
        if self.limits is not None:
            limits = self.limits
            body["limits"] = to_wire(limits) if isinstance(limits, Limits) else dict(limits)
        for name, value in (("env", self.env), ("labels", self.labels)):
            if value:
                body[name] = dict(value)
        for name, words in (("entrypoint", self.entrypoint), ("cmd", self.cmd)):
            if words is not None:
                body[name] = list(words)
        if self.hostname:
            body["hostname"] = self.hostname
        for name, seconds in (("idle_ttl_ms", self.idle_ttl), ("max_ttl_ms", self.max_ttl)):
            if seconds is not None:
                body[name] = milliseconds(seconds)
        if not self.auto_resume:
            body["auto_resume"] = False
        if self.allow_setuid:
            body["allow_setuid"] = True
        return body


@dataclass(frozen=True, slots=True)
class End:
    """The end of a sandbox."""

    reason: EndReason
    """Why."""
    cause: Cause = Cause.PLATFORM
    """Who brought it about."""
    infra_failed: bool = False
    """Whether the platform failed, so that the sandbox's result should not be used."""
    message: str = ""
    """More, for a person."""


@dataclass(frozen=True, slots=True)
class SandboxStatus:
    """A sandbox as it was when the server answered."""

    id: str
    """Its id."""
    state: State
    """State."""
    project_id: str = "default"
    """Whose it is."""
    environment: str = ""
    """Name of its environment."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels."""
    limits: Limits = field(default_factory=Limits)
    """Limits."""
    created_at: datetime | None = None
    """Creation."""
    started_at: datetime | None = None
    """First moment in ``running``."""
    ended_at: datetime | None = None
    """End."""
    end: End | None = None
    """Why it ended."""
    idle_ttl_ms: int = 0
    """Idle life, 0 = unlimited."""
    max_ttl_ms: int = 0
    """Whole life, 0 = unlimited."""
    auto_resume: bool = True
    """Whether requests resume it when it is paused."""
    entrypoint_command_id: str | None = None
    """The command it started with, where its environment has an entry point."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The disk of a sandbox as it was at one moment, kept on its node for as long as the sandbox lives."""

    number: int
    """Its number, rising from 1."""
    created_at: datetime | None = None
    """When."""
    frozen_us: int = 0
    """Microseconds that the sandbox stood still for it."""


@dataclass(frozen=True, slots=True)
class SandboxStats:
    """Use of resources by a sandbox."""

    cpu_ms: int = 0
    """CPU time since the start."""
    memory_bytes: int = 0
    """Memory charged now."""
    memory_peak_bytes: int = 0
    """Highest memory charged so far."""
    pids: int = 0
    """Processes and threads."""
    disk_bytes: int = 0
    """Bytes in the writable layer."""
    oom_kills: int = 0
    """Processes killed for want of memory."""
    read_bytes: int = 0
    """Bytes that it asked for of layers that are read lazily. What the host has in memory is not asked for."""
    fetched_bytes: int = 0
    """Bytes of layers that were fetched from the shared store because it read them."""
    image_chunks: int = 0
    """Chunks of its layers that are read lazily; 0 where none is."""
    image_touched_chunks: int = 0
    """Of these, chunks that were read, by this sandbox or another one that has the layer."""
