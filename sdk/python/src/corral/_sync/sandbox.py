"""One sandbox."""

# Made from ../_async by tools/unasync.py; do not edit.

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from .._errors import Conflict, CorralError, NotFound, SandboxEnded, error_of
from .._requests import Request, checked, exec_body, inline_stdin, path
from .._retry import Repeat
from .._types import (
    Checkpoint,
    CommandStatus,
    ExecResult,
    ImageRecord,
    SandboxStats,
    SandboxStatus,
    SessionStatus,
    State,
    decode,
    decode_result,
    milliseconds,
)
from ._transport import Transport
from .commands import Command
from .files import Files
from .pty import Pty
from .sessions import Session


class Sandbox:
    """A sandbox. As a context manager it is removed at the end.

    A handle holds nothing open: any number of them, in any process, may stand for the same sandbox.
    """

    def __init__(self, transport: Transport, status: SandboxStatus) -> None:
        self._transport = transport
        self.status = status
        """As it was when last asked for."""
        self.files = Files(transport, status.id)
        """Files inside."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}, {self.status.state}>"

    @property
    def id(self) -> str:
        """Its id."""
        return self.status.id

    @property
    def state(self) -> State:
        """Its state when last asked for."""
        return self.status.state

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return self.status.labels

    def _path(self, *more: str) -> str:
        return path("sandboxes", self.id, *more)

    def _update(self, request: Request) -> SandboxStatus:
        self.status = decode(SandboxStatus, self._transport.json(request))
        return self.status

    def refresh(self) -> SandboxStatus:
        """Asks for its state."""
        return self._update(Request("GET", self._path()))

    def pause(self) -> SandboxStatus:
        """Freezes it: its processes stop, its memory and files stay."""
        return self._update(Request("POST", self._path("pause")))

    def resume(self) -> SandboxStatus:
        """Lets it go on."""
        return self._update(Request("POST", self._path("resume")))

    def set_ttl(self, *, idle: float | None = None, total: float | None = None) -> SandboxStatus:
        """Changes how long it lives, in seconds, 0 = unlimited; what is None stays.

        ``idle`` counts from the last request, ``total`` from the creation.
        """
        body = {}
        if idle is not None:
            body["idle_ttl_ms"] = milliseconds(idle)
        if total is not None:
            body["max_ttl_ms"] = milliseconds(total)
        return self._update(Request("PUT", self._path("ttl"), json=body))

    def stats(self) -> SandboxStats:
        """Resources it uses now."""
        return decode(SandboxStats, self._transport.json(Request("GET", self._path("stats"))))

    def snapshot(self, name: str, *, scrub: Sequence[str] = ()) -> ImageRecord:
        """Packs what it wrote into a layer, and makes an image of it that new sandboxes start from.

        It stands still only while its file system is copied. ``scrub`` leaves paths out, with all below them:
        absolute patterns in which ``*`` matches within a name and ``**`` any number of names.
        """
        body = {"name": name, "scrub": list(scrub)}
        request = Request("POST", self._path("snapshots"), json=body, repeat=Repeat.REFUSED, read_timeout=600)
        return decode(ImageRecord, self._transport.json(request))

    def checkpoint(self) -> Checkpoint:
        """Keeps its disk as it is now, on its node, for as long as it lives. Takes milliseconds."""
        request = Request("POST", self._path("checkpoints"), repeat=Repeat.REFUSED)
        return decode(Checkpoint, self._transport.json(request))

    def checkpoints(self) -> list[Checkpoint]:
        """Its checkpoints, oldest first."""
        listed = self._transport.json(Request("GET", self._path("checkpoints")))
        return [decode(Checkpoint, item) for item in listed["checkpoints"]]

    def drop_checkpoint(self, checkpoint: Checkpoint | int) -> None:
        """Removes a checkpoint."""
        number = checkpoint if isinstance(checkpoint, int) else checkpoint.number
        self._transport.send(Request("DELETE", self._path("checkpoints", str(number)), gone_is_done=True))

    def rollback(self, checkpoint: Checkpoint | int) -> SandboxStatus:
        """Puts its disk back to a checkpoint. All its processes end, and its entry point starts again."""
        number = checkpoint if isinstance(checkpoint, int) else checkpoint.number
        request = Request("POST", self._path("rollback"), json={"checkpoint": number}, repeat=Repeat.REFUSED)
        return self._update(request)

    def fork(
        self, count: int = 1, *, labels: Mapping[str, str] | None = None, idempotency_key: str | None = None
    ) -> list[Sandbox | CorralError]:
        """Makes new sandboxes whose disks begin as this one's is now; a result for each. Processes are not copied."""
        body: dict[str, Any] = {"count": count, "idempotency_key": idempotency_key or uuid.uuid4().hex}
        if labels is not None:
            body["labels"] = dict(labels)
        request = Request("POST", self._path("fork"), json=body, read_timeout=600)
        answer = self._transport.json(request)
        return [self._forked(item) for item in answer["items"]]

    def _forked(self, item: Mapping[str, Any]) -> Sandbox | CorralError:
        if "sandbox" in item:
            return Sandbox(self._transport, decode(SandboxStatus, item["sandbox"]))
        return error_of(item.get("problem") or {})

    def delete(self) -> SandboxStatus:
        """Stops it and removes what it wrote. One that has ended stays as it ended."""
        return self._update(Request("DELETE", self._path(), read_timeout=600))

    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        step_key: str | None = None,
        check: bool = False,
        max_output_bytes: int = 0,
        merge_stderr: bool = False,
    ) -> ExecResult:
        """Runs a command and waits for its end.

        A text is a command line for ``/bin/sh``; a list is a program with its arguments. After ``timeout`` seconds
        everything the command started is killed. With ``step_key`` the command never runs twice: the same key again
        returns the recorded result, and lost connections are retried. With ``check``, raises ``CommandFailed`` or
        ``CommandTimeout`` unless it exited with 0. Output beyond ``max_output_bytes`` of a stream (0 = 16 MiB) keeps
        its head and tail.
        """
        text, streamed = inline_stdin(stdin)
        body = exec_body(
            command,
            cwd=cwd,
            env=env,
            user=user,
            stdin=text,
            open_stdin=streamed is not None,
            timeout=timeout,
            step_key=step_key,
            background=streamed is not None,
            max_output_bytes=max_output_bytes,
            merge_stderr=merge_stderr,
        )
        if streamed is not None:
            handle = self._start(body, step_key)
            try:
                handle.write_stdin(streamed, close=True)
            except (NotFound, SandboxEnded):
                raise
            except Conflict:
                # A command may close its input before it has read everything, and go on.
                pass
            except Exception:
                # Or end.
                if (handle.refresh()).running:
                    raise
            return handle.result(check=check)
        request = Request(
            "POST",
            self._path("exec"),
            json=body,
            repeat=Repeat.SAFE if step_key is not None else Repeat.REFUSED,
            read_timeout=None,
        )
        result = decode_result(self._transport.json(request))
        handle = Command(self._transport, self.id, result.command)
        return checked(handle.complete(result), check)

    def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | None = None,
        open_stdin: bool = False,
        timeout: float | None = None,
        step_key: str | None = None,
        max_output_bytes: int = 0,
        merge_stderr: bool = False,
    ) -> Command:
        """Starts a command in the background. ``open_stdin`` keeps its input open for ``write_stdin``."""
        body = exec_body(
            command,
            cwd=cwd,
            env=env,
            user=user,
            stdin=stdin,
            open_stdin=open_stdin,
            timeout=timeout,
            step_key=step_key,
            background=True,
            max_output_bytes=max_output_bytes,
            merge_stderr=merge_stderr,
        )
        return self._start(body, step_key)

    def _start(self, body: dict[str, Any], step_key: str | None) -> Command:
        request = Request(
            "POST",
            self._path("exec"),
            json=body,
            repeat=Repeat.SAFE if step_key is not None else Repeat.REFUSED,
        )
        return Command(self._transport, self.id, decode(CommandStatus, self._transport.json(request)))

    def commands(self) -> list[Command]:
        """Its commands, oldest first."""
        listed = self._transport.json(Request("GET", self._path("commands")))
        return [Command(self._transport, self.id, decode(CommandStatus, c)) for c in listed["commands"]]

    def command(self, command_id: str) -> Command:
        """A command by its id."""
        request = Request("GET", self._path("commands", command_id))
        return Command(self._transport, self.id, decode(CommandStatus, self._transport.json(request)))

    def session(
        self,
        *,
        shell: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Session:
        """Opens a shell session: directory, variables and functions stay between its commands."""
        given = {"shell": shell, "cwd": cwd, "env": dict(env) if env else None, "user": user}
        body = {name: value for name, value in given.items() if value is not None}
        request = Request("POST", self._path("sessions"), json=body, repeat=Repeat.REFUSED)
        return Session(self._transport, self.id, decode(SessionStatus, self._transport.json(request)))

    def sessions(self) -> list[Session]:
        """Its sessions."""
        listed = self._transport.json(Request("GET", self._path("sessions")))
        return [Session(self._transport, self.id, decode(SessionStatus, s)) for s in listed["sessions"]]

    def pty(
        self,
        argv: Sequence[str] | None = None,
        *,
        cwd: str | None = None,
        user: str | None = None,
        cols: int = 80,
        rows: int = 24,
        command_id: str | None = None,
        offset: int | None = None,
    ) -> Pty:
        """Starts a program (the shell where ``argv`` is absent) on a terminal, or comes back to one."""
        return Pty.open(
            self._transport,
            self.id,
            argv=argv,
            cwd=cwd,
            user=user,
            cols=cols,
            rows=rows,
            command_id=command_id,
            offset=offset,
        )

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.delete()
        except NotFound:
            return
