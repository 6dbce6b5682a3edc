"""Shell sessions: directory, variables and functions stay between commands."""

from __future__ import annotations

from types import TracebackType

from .._errors import NotFound, SandboxEnded
from .._requests import Request, checked, path
from .._retry import Repeat
from .._types import ExecResult, SessionStatus, decode_result, milliseconds
from ._transport import AsyncTransport
from .commands import AsyncCommand


class AsyncSession:
    """A shell in a sandbox. As a context manager it is closed at the end, with everything it started."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str, status: SessionStatus) -> None:
        self._transport = transport
        self.sandbox_id = sandbox_id
        self.status = status
        """As it was when last asked for."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.sandbox_id}>"

    @property
    def id(self) -> str:
        """Its id."""
        return self.status.id

    async def run(
        self, command: str, *, timeout: float | None = None, step_key: str | None = None, check: bool = False
    ) -> ExecResult:
        """Runs shell text and waits for its end.

        ``timeout`` kills what the command started; the session lives on where its shell does. With ``step_key`` the
        command never runs twice: the same key again returns the recorded result. With ``check``, raises
        ``CommandFailed`` or ``CommandTimeout`` unless it exited with 0.
        """
        body: dict[str, object] = {"command": command}
        if timeout is not None:
            body["timeout_ms"] = milliseconds(timeout)
        if step_key is not None:
            body["step_key"] = step_key
        request = Request(
            "POST",
            path("sandboxes", self.sandbox_id, "sessions", self.id, "run"),
            json=body,
            repeat=Repeat.SAFE if step_key is not None else Repeat.REFUSED,
            read_timeout=None,
        )
        result = decode_result(await self._transport.json(request))
        handle = AsyncCommand(self._transport, self.sandbox_id, result.command)
        return checked(await handle.complete(result), check)

    async def close(self) -> None:
        """Closes it and kills what it started."""
        request = Request("DELETE", path("sandboxes", self.sandbox_id, "sessions", self.id), gone_is_done=True)
        await self._transport.send(request)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except (NotFound, SandboxEnded):
            return
