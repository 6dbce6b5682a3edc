"""Requests as values: what both clients send, and how answers become errors."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ._errors import CommandFailed, CommandTimeout, CorralError, ProtocolError, error_of
from ._retry import Repeat
from ._types import ExecResult, OutcomeType, milliseconds

ORDINARY_READ_TIMEOUT = 120.0
"""Seconds without a byte after which an ordinary request is given up."""
INLINE_STDIN_BYTES = 256 << 10
"""Longer input is streamed."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request before it has a connection. ``body`` makes the body anew for each attempt."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    json: Any = None
    body: Callable[[], Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeat: Repeat = Repeat.SAFE
    read_timeout: float | None = ORDINARY_READ_TIMEOUT
    gone_is_done: bool = False
    """A repeated removal that finds nothing has done its work before."""


def path(*segments: str) -> str:
    """A path from segments, each percent-encoded."""
    return "/v1/" + "/".join(quote(s, safe=":") for s in segments)


def query(**params: Any) -> dict[str, Any]:
    """Query parameters without those that are None; booleans as the server spells them."""
    spelled = {True: "true", False: "false"}
    return {
        name: spelled[value] if isinstance(value, bool) else value
        for name, value in params.items()
        if value is not None
    }


def exec_body(
    command: str | Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    user: str | None,
    stdin: str | None,
    open_stdin: bool,
    timeout: float | None,
    step_key: str | None,
    background: bool,
    max_output_bytes: int,
    merge_stderr: bool,
) -> dict[str, Any]:
    """The body of ``POST …/exec``."""
    body: dict[str, Any] = {"shell": command} if isinstance(command, str) else {"argv": list(command)}
    options: dict[str, Any] = {
        "cwd": cwd,
        "env": dict(env) if env else None,
        "user": user,
        "stdin": stdin,
        "open_stdin": open_stdin or None,
        "timeout_ms": milliseconds(timeout) if timeout is not None else None,
        "step_key": step_key,
        "background": background or None,
        "max_output_bytes": max_output_bytes or None,
        "merge_stderr": merge_stderr or None,
    }
    return body | {name: value for name, value in options.items() if value is not None}


def inline_stdin(stdin: str | bytes | None) -> tuple[str | None, bytes | None]:
    """Splits input into what goes into the request and what is streamed after it."""
    if stdin is None:
        return None, None
    raw = stdin.encode() if isinstance(stdin, str) else bytes(stdin)
    if len(raw) <= INLINE_STDIN_BYTES:
        try:
            return raw.decode(), None
        except UnicodeDecodeError:
            pass
    return None, raw


def checked(result: ExecResult, check: bool) -> ExecResult:
    """Raises for a command that did not exit with 0, where that is asked for."""
    if not check or result.ok:
        return result
    shown = shlex.join(result.command.argv)[:200]
    if result.outcome.type == OutcomeType.TIMED_OUT:
        raise CommandTimeout(result, f"{shown!r} reached its limit of {result.outcome.timeout_ms} ms")
    raise CommandFailed(result, f"{shown!r} ended with status {result.exit_code}")


def answer_error(status: int, headers: Mapping[str, str], body: bytes) -> CorralError:
    """The error an answer stands for."""
    try:
        problem = json.loads(body)
    except ValueError:
        problem = None
    if not isinstance(problem, dict) or "kind" not in problem:
        text = body[:500].decode("utf-8", "replace").strip()
        problem = {
            "kind": "unknown",
            "message": text or f"the server answered with status {status}",
            "retryable": status in {429, 502, 503, 504},
            "infra_failed": status >= 500,
        }
    error = error_of(problem, status)
    error.request_id = error.request_id or headers.get("x-request-id")
    if error.retry_after is None:
        try:
            error.retry_after = max(0.0, float(headers["retry-after"]))
        except (KeyError, ValueError):
            error.retry_after = None
    return error


def may_repeat(error: CorralError, repeat: Repeat) -> bool:
    """Whether a refused request may be sent again."""
    if error.status in {429, 503}:
        return True
    return repeat is Repeat.SAFE and error.retryable


def parse(body: bytes) -> Any:
    """The JSON of an answer."""
    try:
        return json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"the server's answer is not JSON: {error}") from error
