"""Dataclasses from and to JSON. Fields and values of later versions do no harm."""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import re
import types
import typing
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, TypeVar

from .._errors import ProtocolError
from .commands import CommandStatus, ExecResult, Outcome, OutcomeType

T = TypeVar("T")


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
