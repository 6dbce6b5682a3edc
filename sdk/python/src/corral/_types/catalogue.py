"""Images, layers, environments and keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from ._enums import OpenEnum
from .sandboxes import EnvironmentSpec


class LayerKind(OpenEnum):
    """What a layer is for."""

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"
    SNAPSHOT = "snapshot"


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
class LayerReads:
    """Reads of a layer that is not wholly on the node, since the server of lazy reads was started."""

    read_bytes: int = 0
    """Bytes that readers asked for. What the host has in memory is not asked for."""
    touched_chunks: int = 0
    """Chunks that readers asked for, of all that the layer has."""
    fetched_bytes: int = 0
    """Bytes that came from the shared store, as they are stored there."""
    hits: int = 0
    """Reads of what was on the node."""
    misses: int = 0
    """Reads that had to wait."""
    errors: int = 0
    """Reads that failed."""
    fetches: int = 0
    """Fetches from the store."""
    fetch_us: int = 0
    """Microseconds that these took together."""


@dataclass(frozen=True, slots=True)
class LayerUsage:
    """What a layer takes on a node."""

    digest: str
    """The layer."""
    size_bytes: int = 0
    """Bytes of metadata and data."""
    local_bytes: int = 0
    """Bytes it takes on the node's disk."""
    chunks: int = 0
    """Its chunks."""
    local_chunks: int = 0
    """Chunks that are on the node."""
    cached_bytes: int = 0
    """Bytes of its data on the node's disk that can be had again."""
    stored_bytes: int | None = None
    """Bytes that its data takes in the shared store; ``None`` for a layer that was never there."""
    shared_bytes: int | None = None
    """Bytes of these that other layers of the node refer to as well."""
    published: bool | None = None
    """Whether it is in the shared store; ``None`` where there is none."""
    mounted: bool = False
    """Whether it is mounted."""
    reads: LayerReads | None = None
    """What was read of it while it was not wholly here."""


@dataclass(frozen=True, slots=True)
class LayerUsageList:
    """What layers take on a node and in the shared store."""

    layers: tuple[LayerUsage, ...] = ()
    """Layers on the node, by digest."""
    elsewhere: int = 0
    """Layers that are only in the shared store."""
    cached_bytes: int = 0
    """Bytes of data on the node that can be had again."""
    cache_limit_bytes: int | None = None
    """The most that these may be before data that no live sandbox has is given up; ``None`` where nothing ever is."""


@dataclass(frozen=True, slots=True)
class GcResult:
    """What a collection removed, or would remove."""

    layers: tuple[str, ...] = ()
    """Layers of the shared store."""
    packs: int = 0
    """Packs of the shared store."""
    pack_bytes: int = 0
    """Bytes of these packs."""
    waiting: int = 0
    """Layers and packs that nothing needs, but not for long enough."""
    kept_bytes: int = 0
    """Bytes of packs that are needed."""
    unfinished: int = 0
    """Uploads to a directory store that were cut off."""
    local: tuple[str, ...] = ()
    """Layers on the node."""
    local_bytes: int = 0
    """Bytes of these layers."""
    dry_run: bool = False
    """Whether nothing was removed."""


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
class PackReport:
    """What was packed of a sandbox's writable layer."""

    entries: int = 0
    """Files, directories, links and whiteouts."""
    deletions: int = 0
    """Whiteouts and opaque directories among them: what the sandbox deleted."""
    size_bytes: int = 0
    """Bytes of the layer."""
    frozen_us: int = 0
    """Microseconds that the sandbox stood still."""
    pack_ms: int = 0
    """Milliseconds that packing took."""
    upload_ms: int = 0
    """Milliseconds that publishing to the shared store took."""
    scrubbed: tuple[str, ...] = ()
    """Paths that the rules left out: the first hundred of them."""
    scrubbed_count: int = 0
    """How many were left out."""


@dataclass(frozen=True, slots=True)
class SnapshotOrigin:
    """Where a snapshot comes from."""

    sandbox_id: str
    """The sandbox."""
    parent: str | None = None
    """The snapshot before it: the sandbox's own last one, else the one it was made from."""
    created_at: datetime | None = None
    """When."""
    report: PackReport = field(default_factory=PackReport)
    """What was packed."""


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
    snapshot: SnapshotOrigin | None = None
    """Where it comes from, for a snapshot of a sandbox."""


class Change(OpenEnum):
    """How a path differs between two images."""

    ADDED = "added"
    CHANGED = "changed"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class DiffEntry:
    """A path that differs."""

    path: str
    """Absolute path."""
    change: Change
    """How it differs."""
    path_base64: str | None = None
    """Where the path is not UTF-8: its bytes in Base64; `path` is then only its readable form."""


@dataclass(frozen=True, slots=True)
class ImageDiff:
    """What differs between two images."""

    entries: tuple[DiffEntry, ...] = ()
    """Paths, sorted."""
    truncated: bool = False
    """Whether there were more than the limit."""


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
class BuildProgress:
    """One line of a build."""

    event: str
    """``step``, ``output``, ``note`` or ``imported``."""
    number: int = 0
    """Number of the step, for ``step`` and ``output``."""
    total: int = 0
    """How many steps there are."""
    line: int = 0
    """Line of the step in the Dockerfile."""
    text: str = ""
    """The instruction, what its command wrote, or the note."""
    cached: bool = False
    """Nothing has to be done for the step: it is about the configuration, or its result was there."""
    stream: str = ""
    """``stdout`` or ``stderr``, for ``output``."""
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
