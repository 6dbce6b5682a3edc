"""Commands, their results and sessions."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from ._enums import OpenEnum


class OutcomeType(OpenEnum):
    """How a command ended."""

    EXITED = "exited"
    SIGNALED = "signaled"
    TIMED_OUT = "timed_out"
    SANDBOX_ENDED = "sandbox_ended"
    ROLLED_BACK = "rolled_back"
    OUTCOME_UNKNOWN = "outcome_unknown"
    NOT_STARTED = "not_started"


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
    cause: str | None = None
    """``platform`` where it failed after the platform had failed it: data of a layer could not be had."""
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
