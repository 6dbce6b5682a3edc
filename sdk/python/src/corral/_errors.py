"""What can go wrong, as exceptions. The server's problem documents map to them by their ``kind``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._types import ExecResult

__all__ = [
    "BuildFailed",
    "CommandFailed",
    "CommandNotStarted",
    "CommandTimeout",
    "Conflict",
    "ConnectionFailed",
    "CorralError",
    "DigestMismatch",
    "DiskFull",
    "Forbidden",
    "IdempotencyMismatch",
    "InsufficientStorage",
    "InvalidImage",
    "InvalidRequest",
    "LimitExceeded",
    "NotConfigured",
    "NotFound",
    "OutcomeUnknown",
    "Overloaded",
    "PermissionDenied",
    "PlatformError",
    "ProtocolError",
    "SandboxEnded",
    "TooLarge",
    "Unauthorized",
    "Unavailable",
    "Unsupported",
    "WrongFileType",
    "error_of",
]


class CorralError(Exception):
    """Base of every error of this package, and the class of kinds this version does not know."""

    kind: str
    """Stable name of what went wrong, such as ``not_found``."""
    message: str
    """For a person."""
    status: int | None
    """HTTP status, where the server answered."""
    retryable: bool
    """Whether the same request may succeed later."""
    retry_after: float | None
    """Seconds to wait before that, where the server said."""
    infra_failed: bool
    """Whether the platform is at fault, not the caller or the program inside."""
    sandbox_id: str | None
    """The sandbox concerned."""
    request_id: str | None
    """Id of the request in the server's log."""

    default_kind = "unknown"

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        status: int | None = None,
        retryable: bool = False,
        retry_after: float | None = None,
        infra_failed: bool = False,
        sandbox_id: str | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind or self.default_kind
        self.message = message
        self.status = status
        self.retryable = retryable
        self.retry_after = retry_after
        self.infra_failed = infra_failed
        self.sandbox_id = sandbox_id
        self.request_id = request_id

    def __str__(self) -> str:
        text = f"{self.kind}: {self.message}"
        if self.request_id and (self.status or 0) >= 500:
            text += f" (request {self.request_id})"
        return text


class NotConfigured(CorralError):
    """No URL or API key is known."""

    default_kind = "not_configured"


class ConnectionFailed(CorralError):
    """No answer came. Unless the request was safe to repeat, what became of it is not known."""

    default_kind = "connection_failed"


class ProtocolError(CorralError):
    """The server's answer cannot be understood."""

    default_kind = "protocol_error"


class InvalidRequest(CorralError):
    """The request is malformed or names something impossible."""

    default_kind = "invalid_request"


class Unauthorized(CorralError):
    """No or an unknown API key."""

    default_kind = "unauthorized"


class Forbidden(CorralError):
    """The key may not do this."""

    default_kind = "forbidden"


class NotFound(CorralError):
    """No such sandbox, command, image, layer, environment, file or route."""

    default_kind = "not_found"


class Conflict(CorralError):
    """The thing exists in another state or form than the request supposes."""

    default_kind = "conflict"


class IdempotencyMismatch(Conflict):
    """The same idempotency or step key was used with another body."""

    default_kind = "idempotency_mismatch"


class WrongFileType(Conflict):
    """The path is a directory, or is none, where the other is needed."""

    default_kind = "wrong_file_type"


class SandboxEnded(CorralError):
    """The sandbox has ended; ``Sandbox.refresh()`` says why."""

    default_kind = "sandbox_ended"


class TooLarge(CorralError):
    """A body, argument list or file is larger than allowed."""

    default_kind = "too_large"


class InvalidImage(CorralError):
    """An archive, manifest or configuration cannot be accepted."""

    default_kind = "invalid_image"


class BuildFailed(CorralError):
    """A step of a build failed."""

    default_kind = "build_failed"
    number: int | None = None
    """Number of the step."""
    exit_code: int | None = None
    """Exit status of its command, as a shell reports it."""
    output: str | None = None
    """The end of what it wrote."""


class DigestMismatch(InvalidImage):
    """Content does not have the digest it was named by."""

    default_kind = "digest_mismatch"


class PermissionDenied(CorralError):
    """Permission was refused inside the sandbox."""

    default_kind = "permission_denied"


class DiskFull(CorralError):
    """The sandbox's disk quota is used up."""

    default_kind = "disk_full"


class LimitExceeded(CorralError):
    """The sandbox could not be given the memory or processes an operation needs."""

    default_kind = "limit_exceeded"


class CommandNotStarted(CorralError):
    """The command could not be started: missing, not executable, or a bad working directory."""

    default_kind = "command_not_started"


class Overloaded(CorralError):
    """Admission refused: the node is full for now."""

    default_kind = "overloaded"


class InsufficientStorage(CorralError):
    """The node's host has too little disk or memory to take more."""

    default_kind = "insufficient_storage"


class Unavailable(CorralError):
    """The service is starting, draining, or has lost a part it needs."""

    default_kind = "unavailable"


class Unsupported(CorralError):
    """This node cannot do it: a kernel feature or backend is missing."""

    default_kind = "unsupported"


class OutcomeUnknown(CorralError):
    """The outcome cannot be known after a crash; the platform never tries it again by itself."""

    default_kind = "outcome_unknown"


class PlatformError(CorralError):
    """A fault of the platform: storage, a remote, or Corral itself."""

    default_kind = "internal"


class CommandFailed(CorralError):
    """A command run with ``check=True`` did not exit with 0."""

    default_kind = "command_failed"
    result: ExecResult
    """What it left."""

    def __init__(self, result: ExecResult, message: str | None = None) -> None:
        tail = result.stderr.strip()[-500:]
        text = message or f"the command ended with status {result.exit_code}"
        super().__init__(f"{text}: {tail}" if tail else text)
        self.result = result


class CommandTimeout(CommandFailed):
    """A command run with ``check=True`` reached its limit and was killed with everything it started."""

    default_kind = "command_timeout"


_BY_KIND: dict[str, type[CorralError]] = {
    cls.default_kind: cls
    for cls in (
        InvalidRequest,
        Unauthorized,
        Forbidden,
        NotFound,
        Conflict,
        IdempotencyMismatch,
        WrongFileType,
        SandboxEnded,
        TooLarge,
        InvalidImage,
        BuildFailed,
        DigestMismatch,
        PermissionDenied,
        DiskFull,
        LimitExceeded,
        CommandNotStarted,
        Overloaded,
        InsufficientStorage,
        Unavailable,
        Unsupported,
        OutcomeUnknown,
        PlatformError,
    )
}
_BY_KIND |= {
    "unknown_user": InvalidRequest,
    "file_busy": Conflict,
    "unsupported_media_type": InvalidRequest,
    "method_not_allowed": InvalidRequest,
    "range_not_satisfiable": InvalidRequest,
    "storage_error": PlatformError,
    "upstream_failed": PlatformError,
    "timeout": PlatformError,
}


def error_of(problem: Mapping[str, Any], status: int | None = None) -> CorralError:
    """The exception for a problem document; unknown kinds become plain :class:`CorralError`."""
    kind = str(problem.get("kind") or "unknown")
    wait = problem.get("retry_after_ms")
    return _BY_KIND.get(kind, CorralError)(
        str(problem.get("message") or problem.get("title") or kind),
        kind=kind,
        status=status if status is not None else problem.get("status"),
        retryable=bool(problem.get("retryable", False)),
        retry_after=wait / 1000 if isinstance(wait, int | float) else None,
        infra_failed=bool(problem.get("infra_failed", False)),
        sandbox_id=problem.get("sandbox_id"),
        request_id=problem.get("request_id"),
    )
