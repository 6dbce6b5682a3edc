"""What the API speaks of, as frozen dataclasses. Fields and values of later versions do no harm."""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, TypeVar

from ._errors import ProtocolError

T = TypeVar("T")


class _OpenEnum(str, enum.Enum):
    """Text with known values; others are kept as they came."""

    @classmethod
    def _missing_(cls, value: object) -> _OpenEnum:
        text = str(value)
        member = str.__new__(cls, text)
        member._name_ = text.upper()
        member._value_ = text
        return member

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) if isinstance(other, str) else NotImplemented

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __str__(self) -> str:
        return str.__str__(self.value)


class State(_OpenEnum):
    """Where a sandbox is in its life."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    ENDED = "ended"


class EndReason(_OpenEnum):
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


class Cause(_OpenEnum):
    """Who brought an end about."""

    AGENT = "agent"
    CLIENT = "client"
    OPERATOR = "operator"
    PLATFORM = "platform"


class LayerKind(_OpenEnum):
    """What a layer is for."""

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"


class FileType(_OpenEnum):
    """What a path names."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    DEVICE = "device"


class OutcomeType(_OpenEnum):
    """How a command ended."""

    EXITED = "exited"
    SIGNALED = "signaled"
    TIMED_OUT = "timed_out"
    SANDBOX_ENDED = "sandbox_ended"
    OUTCOME_UNKNOWN = "outcome_unknown"
    NOT_STARTED = "not_started"


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended."""

    type: OutcomeType
    """Which way."""
    code: int | None = None
    """Exit code, for ``exited``."""
    signal: int | None = None
    """Number of the signal, for ``signaled``."""
    name: str | None = None
    """Name of the signal."""
    oom: bool = False
    """The kernel killed it because the sandbox's memory was used up."""
    timeout_ms: int | None = None
    """The limit, for ``timed_out``."""
    message: str | None = None
    """Why not, for ``not_started``."""


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """How much a command wrote to a stream."""

    total_bytes: int = 0
    """Bytes so far, kept or not."""
    truncated: bool = False
    """Whether bytes between head and tail were dropped."""
    dropped_from: int = 0
    """First dropped offset."""
    dropped_to: int = 0
    """First kept offset after the gap."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that can still be read."""
        return self.total_bytes - (self.dropped_to - self.dropped_from if self.truncated else 0)


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources a command used."""

    cpu_ms: int = 0
    """CPU time."""
    peak_memory_bytes: int = 0
    """Largest resident set."""
    wall_ms: int = 0
    """Time from start to end."""


@dataclass(frozen=True, slots=True)
class CommandStatus:
    """A command as it was when the server answered."""

    id: str
    """Its id."""
    argv: tuple[str, ...] = ()
    """Program and arguments."""
    running: bool = False
    """Whether it still ran."""
    session_id: str | None = None
    """The session it ran in."""
    step_key: str | None = None
    """The step key it was sent with."""
    end: Outcome | None = None
    """How it ended."""
    stdout: StreamStatus = field(default_factory=StreamStatus)
    """Standard output."""
    stderr: StreamStatus = field(default_factory=StreamStatus)
    """Standard error."""
    usage: Usage | None = None
    """Resources, once ended."""
    started_at: datetime | None = None
    """Start."""
    ended_at: datetime | None = None
    """End."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command left."""

    exit_code: int
    """As a shell reports it: the code, 128 + signal, 124 after its limit, 125 when there is none."""
    stdout_bytes: bytes
    """What was kept of standard output."""
    stderr_bytes: bytes
    """What was kept of standard error."""
    command: CommandStatus
    """Everything else."""

    @property
    def stdout(self) -> str:
        """Standard output as text; bytes that are no UTF-8 are replaced."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Standard error as text; bytes that are no UTF-8 are replaced."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        return self.command.end or Outcome(OutcomeType.OUTCOME_UNKNOWN)

    @property
    def truncated(self) -> bool:
        """Whether output is missing: more was written than is kept."""
        out, err = self.command.stdout, self.command.stderr
        return (
            len(self.stdout_bytes) < out.total_bytes
            or len(self.stderr_bytes) < err.total_bytes
            or out.truncated
            or err.truncated
        )

    @property
    def usage(self) -> Usage:
        """Resources it used."""
        return self.command.usage or Usage()

    @property
    def timed_out(self) -> bool:
        """Whether it reached its limit."""
        return self.outcome.type == OutcomeType.TIMED_OUT

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Bytes a command wrote."""

    stream: str
    """``stdout`` or ``stderr``."""
    offset: int
    """Offset of the first byte in its stream."""
    data: bytes
    """The bytes."""

    @property
    def text(self) -> str:
        """The bytes as text; what is no UTF-8 is replaced."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """A shell session."""

    id: str
    """Its id."""
    command_id: str = ""
    """The shell's command."""
    open: bool = True
    """Whether it takes commands."""


@dataclass(frozen=True, slots=True)
class FileStatus:
    """A file's attributes."""

    path: str
    """Path as asked for; in lists, relative to the listed directory."""
    file_type: FileType = FileType.FILE
    """Sort; symbolic links are not followed."""
    size_bytes: int = 0
    """Size."""
    mode: int = 0
    """Permission bits."""
    uid: int = 0
    """Owner inside."""
    gid: int = 0
    """Group inside."""
    mtime_ms: int = 0
    """Last change of the content, milliseconds since 1970."""
    link_target: str | None = None
    """Target of a symbolic link."""


@dataclass(frozen=True, slots=True)
class DirectoryPage:
    """A directory's entries, sorted by path."""

    entries: tuple[FileStatus, ...] = ()
    """Entries."""
    truncated: bool = False
    """Whether there were more than the limit."""

    def __iter__(self) -> Iterator[FileStatus]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change below a watched directory."""

    event: str
    """``ready``, ``created``, ``modified``, ``removed``, ``attributes`` or ``overflow``."""
    path: str = ""
    """Relative to the watched directory."""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """A stored layer."""

    digest: str
    """Digest of its bytes, by which it is named."""
    kind: LayerKind = LayerKind.BASE
    """What it is for."""
    at: str = "/"
    """Where its content lies inside the sandbox."""
    size_bytes: int = 0
    """Size of the stored file."""
    entries: int = 0
    """Files, directories, links and whiteouts in it."""


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The part of an image's configuration that sandboxes honour."""

    env: dict[str, str] = field(default_factory=dict)
    """Variables."""
    workdir: str = "/"
    """Working directory."""
    user: str = ""
    """User; empty means root."""
    entrypoint: tuple[str, ...] = ()
    """What every sandbox starts with, ``cmd`` as its arguments."""
    cmd: tuple[str, ...] = ()
    """Arguments of the entry point; without one, nothing runs them."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels."""


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """An imported image."""

    name: str
    """Name it was imported under."""
    digest: str = ""
    """Digest over configuration and layers."""
    source_digest: str | None = None
    """Digest of the manifest in its source."""
    platform: str = ""
    """``os/architecture[/variant]``."""
    config: ImageConfig = field(default_factory=ImageConfig)
    """Configuration."""
    layers: tuple[LayerRecord, ...] = ()
    """Layers, lowest first."""
    size_bytes: int = 0
    """Sum of the layers' stored sizes."""


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """One step of an import."""

    event: str
    """``planned``, ``fetched``, ``building``, ``stored``, ``imported``, ``built`` or ``failed``."""
    layers: int = 0
    """Source layers, for ``planned``."""
    layer: int | LayerRecord | None = None
    """Index of the layer concerned, or the built layer."""
    bytes: int = 0
    """Bytes so far, or of the stored layer."""
    digest: str | None = None
    """Digest of a stored layer."""
    image: ImageRecord | None = None
    """The image, for ``imported``."""


@dataclass(frozen=True, slots=True)
class EnvironmentRecord:
    """A named environment."""

    name: str
    """Its name."""
    spec: EnvironmentSpec
    """What it is made of."""
    created_at: datetime | None = None
    """Creation."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key without its text."""

    id: str
    """Its id."""
    name: str = ""
    """What it is for."""
    project_id: str = ""
    """Whose requests it makes."""
    created_at: datetime | None = None
    """Creation."""


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new API key: the only time its text is shown."""

    id: str
    """Its id."""
    name: str
    """What it is for."""
    key: str = field(repr=False)
    """The key."""


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


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a sandbox."""

    seq: int
    """Sequence number on its node."""
    type: str
    """``state``, ``command_started``, ``command_ended``, or one of a later version."""
    sandbox_id: str = ""
    """Which sandbox."""
    at: datetime | None = None
    """When."""
    state: State | None = None
    """The new state, for ``state``."""
    end: End | None = None
    """Why it ended, for the state ``ended``."""
    command_id: str | None = None
    """Which command."""
    outcome: Outcome | None = None
    """How the command ended."""


@dataclass(frozen=True, slots=True)
class EventPage:
    """A page of events."""

    events: tuple[Event, ...] = ()
    """Events in order."""
    last_seq: int = 0
    """Pass as ``after`` to go on."""
    gap: bool = False
    """Whether older events were dropped since ``after``."""


def milliseconds(seconds: float) -> int:
    """Seconds as whole milliseconds; anything above 0 stays above 0."""
    if seconds < 0:
        raise ValueError(f"{seconds} s: a time cannot be negative")
    return max(1, round(seconds * 1000)) if seconds > 0 else 0


def to_wire(value: Any) -> Any:
    """A dataclass as JSON, without what is None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: to_wire(v) for name, v in pairs if v is not None}
    if isinstance(value, Mapping):
        return {str(k): to_wire(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_wire(v) for v in value]
    return value


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def decode(cls: type[T], data: Any) -> T:
    """Reads a dataclass from JSON. Fields it does not have are skipped."""
    if not isinstance(data, Mapping):
        raise ProtocolError(f"the server sent {type(data).__name__} where {cls.__name__} was expected")
    values: dict[str, Any] = {}
    hints = _hints(cls)  # type: ignore[arg-type]
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if data.get(f.name) is not None:
            values[f.name] = _value(hints[f.name], data[f.name], f"{cls.__name__}.{f.name}")
    try:
        return cls(**values)
    except TypeError as error:
        raise ProtocolError(f"the server's {cls.__name__} is incomplete: {error}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in {types.UnionType, typing.Union}:
        options = [a for a in typing.get_args(hint) if a is not type(None)]
        scalar = [a for a in options if not dataclasses.is_dataclass(a)]
        nested = [a for a in options if dataclasses.is_dataclass(a)]
        wanted = nested if isinstance(value, Mapping) and nested else scalar or nested
        return _value(wanted[0], value, where)
    if hint is Outcome:
        return decode_outcome(value)
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast("type[Any]", hint), value)
    if hint is datetime:
        return parse_time(str(value))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if origin is tuple:
        if not isinstance(value, list):
            raise ProtocolError(f"{where} is not a list")
        return tuple(_value(typing.get_args(hint)[0], item, where) for item in value)
    if isinstance(value, Mapping):
        return dict(value)
    if hint is float and isinstance(value, int):
        return float(value)
    if hint in {int, str, bool, float} and not isinstance(value, hint):
        raise ProtocolError(f"{where} is {value!r}, not {hint.__name__}")
    return value


def decode_outcome(value: Any) -> Outcome:
    """Reads how a command ended; the wire names the way as ``type`` or as the only key."""
    if isinstance(value, str):
        return Outcome(OutcomeType(value))
    if isinstance(value, Mapping):
        for tag in ("type", "outcome", "kind"):
            if tag in value:
                return decode(Outcome, {**value, "type": value[tag]})
        if len(value) == 1:
            [(name, inner)] = value.items()
            return decode(Outcome, {**(inner if isinstance(inner, Mapping) else {}), "type": name})
    raise ProtocolError(f"{value!r} is no outcome")


_TIME = re.compile(r"^(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(?:\.(\d+))?([Zz]|[+-]\d\d:\d\d)$")


def parse_time(text: str) -> datetime:
    """Reads an RFC 3339 time."""
    match = _TIME.match(text)
    if not match:
        raise ProtocolError(f"{text!r} is not a time")
    day, clock, fraction, zone = match.groups()
    micros = (fraction or "0")[:6].ljust(6, "0")
    zone = "+00:00" if zone in {"Z", "z"} else zone
    return datetime.fromisoformat(f"{day}T{clock}.{micros}{zone}").astimezone(timezone.utc)


def output_bytes(value: Any) -> bytes:
    """The bytes of output inside JSON."""
    if isinstance(value, Mapping):
        if value.get("base64") is not None:
            return base64.b64decode(value["base64"])
        return str(value.get("text") or "").encode()
    raise ProtocolError("output is missing from the result")


def decode_result(data: Any) -> ExecResult:
    """Reads a command's result."""
    if not isinstance(data, Mapping) or "exit_code" not in data:
        raise ProtocolError("the server's answer is not a command's result")
    return ExecResult(
        exit_code=int(data["exit_code"]),
        stdout_bytes=output_bytes(data.get("stdout")),
        stderr_bytes=output_bytes(data.get("stderr")),
        command=decode(CommandStatus, data.get("command")),
    )
