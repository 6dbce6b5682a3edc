"""Another version of Corral takes over what runs: the keepers are replaced in their processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from conftest import SMALL
from corral import State
from support import LIBEXEC, Server, until
from test_crashes import host_and_list_agree, node

pytestmark = pytest.mark.timeout(600)

COUNT = """n=0; while [ $n -lt 300 ]; do echo line $n; n=$((n+1))
[ $n -eq 20 ] && while [ ! -e /tmp/go ]; do sleep 0.1; done; done; exit 5"""


def another_installation(directory: Path) -> Path:
    """The same programs, one of them with a byte more behind its end: other ones by their digest."""
    shutil.copytree(LIBEXEC, directory)
    with (directory / "corral-keeper").open("ab") as file:
        file.write(b"\n")
    return directory


def executable_of(pid: int) -> str:
    return str(Path(f"/proc/{pid}/exe").readlink())


def restart(server: Server) -> None:
    assert server.stop() == 0
    server.start()


def test_keepers_are_replaced_under_running_commands(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client):
        boxes = [client.sandboxes.create("bb", limits=SMALL) for _ in range(6)]
        box = boxes[0]
        counting = [b.start(COUNT, step_key="count") for b in boxes]
        for command in counting:
            until(lambda c=command: c.output().endswith(b"line 19\n"), 60)  # type: ignore[misc]
        asking = box.start("read x; echo got $x; read y; echo and $y", open_stdin=True)
        asking.write_stdin("one\n")
        until(lambda: asking.output() == b"got one\n", 30)
        session = box.session()
        session.run("cd /tmp; kept=yes")
        with boxes[1].pty(["/bin/sh"]) as terminal:
            terminal.send(b"echo in$((1+1)) it\n")
            assert terminal.command_id is not None
            shell = boxes[1].command(terminal.command_id)
            until(lambda: b"in2 it" in shell.output(), 30)
        keepers = server.keepers()
        assert {executable_of(pid) for pid in keepers} == {str(LIBEXEC / "corral-keeper")}

        server.libexec = another_installation(tmp_path / "another")
        assert server.stop() == 0
        server.start()

        assert sorted(server.keepers()) == sorted(keepers), "they are the same processes"
        assert {executable_of(pid) for pid in keepers} == {str(server.libexec / "corral-keeper")}
        assert all(b.refresh().state == State.RUNNING for b in boxes)
        for b, command in zip(boxes, counting, strict=True):
            b.files.write("/tmp/go", b"")
            ended = command.wait().end
            assert ended is not None
            assert ended.code == 5
            assert command.output() == b"".join(b"line %d\n" % n for n in range(300))
            assert b.start(COUNT, step_key="count").id == command.id, "it does not run twice"
        asking.write_stdin("two\n")
        asking.close_stdin()
        asking.wait()
        assert asking.output() == b"got one\nand two\n"
        with boxes[1].pty(command_id=shell.id, offset=0) as terminal:
            terminal.send(b"echo back$((1+1)) in it\n")
            until(lambda: b"back2 in it" in shell.output(), 30)
        assert session.run("pwd; echo $kept").stdout == "/tmp\nyes\n"
        assert "ptmx" in boxes[2].exec("ls /dev/pts").stdout, "terminals come on first use, also of a later program"
        assert client.sandboxes.create("bb", limits=SMALL).exec("echo new").stdout == "new\n"

        restart(server)
        assert box.exec("echo again").stdout == "again\n"
        boxes[1].delete()
        host_and_list_agree(server, client)


def test_a_program_that_cannot_be_executed_changes_nothing(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client):
        box = client.sandboxes.create("bb", limits=SMALL)
        sleeper = box.start("sleep 1000")
        keepers = server.keepers()
        server.libexec = another_installation(tmp_path / "another")
        (server.libexec / "corral-keeper").write_bytes(b"\x7fELF, but no more than that")
        restart(server)
        assert sorted(server.keepers()) == sorted(keepers)
        assert box.exec("echo here").stdout == "here\n"
        assert sleeper.refresh().running
        assert "stays" in server.tail(200)
        assert box.refresh().state == State.RUNNING
