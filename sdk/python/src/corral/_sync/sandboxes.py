"""Creating, finding and listing sandboxes."""

# Made from ../_async by tools/unasync.py; do not edit.

from __future__ import annotations

import uuid
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from .._errors import CorralError, ProtocolError, SandboxEnded, error_of
from .._requests import Request, path, query
from .._retry import Attempts, Repeat
from .._types import EnvironmentSpec, Limits, SandboxSpec, SandboxStatus, State, decode
from . import _backend
from ._transport import Transport
from .sandbox import Sandbox

_BATCH = 1000


class Sandboxes:
    """The sandboxes of a project."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        environment: str | None = None,
        *,
        image: str | None = None,
        spec: EnvironmentSpec | None = None,
        limits: Limits | Mapping[str, float] | None = None,
        env: Mapping[str, str] | None = None,
        entrypoint: Sequence[str] | None = None,
        cmd: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        hostname: str | None = None,
        idle_ttl: float | None = None,
        max_ttl: float | None = None,
        auto_resume: bool = True,
        allow_setuid: bool = False,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Creates a sandbox and waits until it runs.

        Give one of ``environment`` (the name of an environment or image), ``image`` or ``spec``. Times are in seconds,
        0 = unlimited. A key is made where none is given, so that a lost answer never leads to a second sandbox.

        A sandbox starts with the environment's entry point, if it has one: a background command, which
        ``status.entrypoint_command_id`` names. ``entrypoint`` replaces it together with its arguments (an empty list
        starts nothing), ``cmd`` its arguments.
        """
        wanted = SandboxSpec(
            environment=environment,
            image=image,
            spec=spec,
            limits=limits,
            env=env,
            entrypoint=entrypoint,
            cmd=cmd,
            labels=labels,
            hostname=hostname,
            idle_ttl=idle_ttl,
            max_ttl=max_ttl,
            auto_resume=auto_resume,
            allow_setuid=allow_setuid,
        )
        attempts = Attempts(self._transport.retry)
        while True:
            request = Request(
                "POST",
                path("sandboxes"),
                json=wanted.to_wire(),
                headers={"idempotency-key": idempotency_key or uuid.uuid4().hex},
                read_timeout=600,
            )
            made = self._started(self._transport.json(request))
            if isinstance(made, Sandbox):
                return made
            # That one is gone for good: under a key of the client's own choice another may be made.
            wait = attempts.wait(why=f"create: {made}") if idempotency_key is None else None
            if wait is None:
                raise made
            _backend.sleep(wait)

    def create_many(
        self,
        specs: Sequence[SandboxSpec],
        *,
        idempotency_key: str | None = None,
        all_or_nothing: bool = False,
    ) -> list[Sandbox | CorralError]:
        """Creates sandboxes in one request for each thousand, with a result for each in their order.

        Refusals that may pass are retried. With ``all_or_nothing`` a failure removes what was created, and raises.
        """
        key = idempotency_key or uuid.uuid4().hex
        results: list[Sandbox | CorralError] = []
        for number, start in enumerate(range(0, len(specs), _BATCH)):
            bodies = [spec.to_wire() for spec in specs[start : start + _BATCH]]
            results += self._create_batch(bodies, key if len(specs) <= _BATCH else f"{key}-{number}")
        failed = next((r for r in results if isinstance(r, CorralError)), None)
        if all_or_nothing and failed is not None:
            for made in results:
                if isinstance(made, Sandbox):
                    made.delete()
            raise failed
        return results

    def _create_batch(self, bodies: list[dict[str, Any]], key: str) -> list[Sandbox | CorralError]:
        attempts = Attempts(self._transport.retry)
        while True:
            request = Request(
                "POST",
                "/v1/sandboxes:batch",
                json={"items": bodies},
                headers={"idempotency-key": key},
                repeat=Repeat.SAFE,
                read_timeout=None,
            )
            answer = self._transport.json(request)
            results = [self._item(item) for item in answer["items"]]
            if len(results) != len(bodies):
                raise ProtocolError(f"{len(results)} results for {len(bodies)} sandboxes")
            refused = [r for r in results if isinstance(r, CorralError) and r.retryable]
            # The same keys again: what was created is found, only what was refused is tried again.
            why = f"{len(refused)} of {len(bodies)} creates: {refused[0]}" if refused else ""
            wait = attempts.wait(max(r.retry_after or 0.0 for r in refused), why=why) if refused else None
            if wait is None:
                return results
            _backend.sleep(wait)

    def _item(self, item: Mapping[str, Any]) -> Sandbox | CorralError:
        if "sandbox" in item:
            return self._started(item["sandbox"])
        return error_of(item.get("problem") or {})

    def _started(self, data: Any) -> Sandbox | CorralError:
        """A created sandbox; one that ended before it ever ran, as after a crash of its node, is a failure."""
        sandbox = self._sandbox(data)
        end = sandbox.status.end
        if sandbox.state != State.ENDED or end is None or sandbox.status.started_at is not None:
            return sandbox
        return SandboxEnded(
            f"the sandbox ended before it ran: {end.message or end.reason}",
            kind=str(end.reason),
            infra_failed=end.infra_failed,
            sandbox_id=sandbox.id,
        )

    def _sandbox(self, data: Any) -> Sandbox:
        return Sandbox(self._transport, decode(SandboxStatus, data))

    def get(self, sandbox_id: str) -> Sandbox:
        """A sandbox by its id; one that has ended stays readable for a day."""
        request = Request("GET", path("sandboxes", sandbox_id))
        return self._sandbox(self._transport.json(request))

    def list(
        self,
        *,
        state: State | str | None = None,
        labels: Mapping[str, str] | None = None,
        environment: str | None = None,
        page_size: int | None = None,
    ) -> Generator[Sandbox, None, None]:
        """Yields the sandboxes that match, page by page."""
        params = query(state=None if state is None else str(state), environment=environment, limit=page_size)
        if labels:
            params["label"] = [f"{key}={value}" for key, value in labels.items()]
        while True:
            page = self._transport.json(Request("GET", path("sandboxes"), params=params))
            for item in page["sandboxes"]:
                yield self._sandbox(item)
            if not page.get("next_cursor"):
                return
            params["cursor"] = page["next_cursor"]
