"""What happened to sandboxes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from .commands import Outcome
from .sandboxes import Cause, End, State


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
    layer: str | None = None
    """The layer whose data could not be had, for ``read_failed``."""
    cause: Cause | None = None
    """Who brought it about, for ``read_failed``."""
    message: str | None = None
    """Why, for ``read_failed``."""


@dataclass(frozen=True, slots=True)
class EventPage:
    """A page of events."""

    events: tuple[Event, ...] = ()
    """Events in order."""
    last_seq: int = 0
    """Pass as ``after`` to go on."""
    gap: bool = False
    """Whether older events were dropped since ``after``."""
