"""Client for Corral: agent sandboxes for RL training and evaluation.

>>> import corral
>>> with corral.Client() as client, client.sandboxes.create("python") as sandbox:  # doctest: +SKIP
...     print(sandbox.exec("python -c 'print(6 * 7)'").stdout)
42

``AsyncClient`` has the same methods as coroutines and asynchronous iterators.
"""

from ._async.client import AsyncClient
from ._async.commands import AsyncCommand
from ._async.files import AsyncFiles
from ._async.pty import AsyncPty
from ._async.sandbox import AsyncSandbox
from ._async.sessions import AsyncSession
from ._errors import (
    CommandFailed,
    CommandNotStarted,
    CommandTimeout,
    Conflict,
    ConnectionFailed,
    CorralError,
    DigestMismatch,
    DiskFull,
    Forbidden,
    IdempotencyMismatch,
    InsufficientStorage,
    InvalidImage,
    InvalidRequest,
    LimitExceeded,
    NotConfigured,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    PermissionDenied,
    PlatformError,
    ProtocolError,
    SandboxEnded,
    TooLarge,
    Unauthorized,
    Unavailable,
    Unsupported,
    WrongFileType,
)
from ._retry import RetryPolicy
from ._sync.client import Client
from ._sync.commands import Command
from ._sync.files import Files
from ._sync.pty import Pty
from ._sync.sandbox import Sandbox
from ._sync.sessions import Session
from ._types import (
    Cause,
    CommandStatus,
    DirectoryPage,
    End,
    EndReason,
    EnvironmentRecord,
    EnvironmentSpec,
    Event,
    EventPage,
    ExecResult,
    FileStatus,
    FileType,
    ImageConfig,
    ImageRecord,
    ImportProgress,
    KeyRecord,
    LayerKind,
    LayerRecord,
    Limits,
    NewKey,
    NodeStatus,
    Outcome,
    OutcomeType,
    OutputChunk,
    SandboxSpec,
    SandboxStats,
    SandboxStatus,
    SessionStatus,
    State,
    StreamStatus,
    Usage,
    VersionInfo,
    WatchEvent,
)
from ._version import __version__

__all__ = [
    "AsyncClient", "AsyncCommand", "AsyncFiles", "AsyncPty", "AsyncSandbox", "AsyncSession",
    "Cause", "Client", "Command", "CommandFailed", "CommandNotStarted", "CommandStatus", "CommandTimeout", "Conflict",
    "ConnectionFailed", "CorralError", "DigestMismatch", "DirectoryPage", "DiskFull", "End", "EndReason",
    "EnvironmentRecord", "EnvironmentSpec", "Event", "EventPage", "ExecResult", "FileStatus", "FileType", "Files",
    "Forbidden", "IdempotencyMismatch", "ImageConfig", "ImageRecord", "ImportProgress", "InsufficientStorage",
    "InvalidImage", "InvalidRequest", "KeyRecord", "LayerKind", "LayerRecord", "LimitExceeded", "Limits", "NewKey",
    "NodeStatus", "NotConfigured", "NotFound", "Outcome", "OutcomeType", "OutcomeUnknown", "OutputChunk", "Overloaded",
    "PermissionDenied", "PlatformError", "ProtocolError", "Pty", "RetryPolicy", "Sandbox", "SandboxEnded",
    "SandboxSpec", "SandboxStats", "SandboxStatus", "Session", "SessionStatus", "State", "StreamStatus", "TooLarge",
    "Unauthorized", "Unavailable", "Unsupported", "Usage", "VersionInfo", "WatchEvent", "WrongFileType", "__version__",
]  # fmt: skip
