"""What the API speaks of, as frozen dataclasses. Fields and values of later versions do no harm."""

from ._wire import decode, decode_outcome, decode_result, milliseconds, output_bytes, parse_time, to_wire
from .catalogue import (
    BuildProgress,
    EnvironmentRecord,
    ImageConfig,
    ImageRecord,
    ImportProgress,
    KeyRecord,
    LayerKind,
    LayerRecord,
    NewKey,
    PackReport,
    SnapshotOrigin,
)
from .commands import CommandStatus, ExecResult, Outcome, OutcomeType, OutputChunk, SessionStatus, StreamStatus, Usage
from .events import Event, EventPage
from .files import DirectoryPage, FileStatus, FileType, WatchEvent
from .sandboxes import Cause, End, EndReason, EnvironmentSpec, Limits, SandboxSpec, SandboxStats, SandboxStatus, State
from .system import NodeStatus, VersionInfo

__all__ = [
    "BuildProgress",
    "Cause",
    "CommandStatus",
    "DirectoryPage",
    "End",
    "EndReason",
    "EnvironmentRecord",
    "EnvironmentSpec",
    "Event",
    "EventPage",
    "ExecResult",
    "FileStatus",
    "FileType",
    "ImageConfig",
    "ImageRecord",
    "ImportProgress",
    "KeyRecord",
    "LayerKind",
    "LayerRecord",
    "Limits",
    "NewKey",
    "NodeStatus",
    "Outcome",
    "OutcomeType",
    "OutputChunk",
    "PackReport",
    "SandboxSpec",
    "SandboxStats",
    "SandboxStatus",
    "SessionStatus",
    "SnapshotOrigin",
    "State",
    "StreamStatus",
    "Usage",
    "VersionInfo",
    "WatchEvent",
    "decode",
    "decode_outcome",
    "decode_result",
    "milliseconds",
    "output_bytes",
    "parse_time",
    "to_wire",
]
