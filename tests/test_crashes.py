"""kill -9 of the daemon, the keepers, or both, and a damaged ledger: nothing lost, doubled or leaked."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import corral
from conftest import SMALL
from corral import OutcomeType, RetryPolicy, State
from support import Server, sandbox_cgroups, until, with_busybox

MANY = int(os.environ.get("CORRAL_TEST_CRASH_SANDBOXES", "200"))
PATIENT = RetryPolicy(attempts=60, total=120, base=0.1, cap=1)
TINY = corral.Limits(memory_mib=16, pids=16, disk_mib=8)

pytestmark = pytest.mark.timeout(600)


@contextmanager
def node(tmp_path: Path) -> Iterator[tuple[Server, corral.Client]]:
    """A node that outlives its daemon, with the small image."""
    server = Server(False)
    with with_busybox(server, tmp_path, retry=PATIENT) as client:
        yield server, client


def live(client: corral.Client) -> dict[str, corral.Sandbox]:
    return {s.id: s for s in client.sandboxes.list() if s.state != State.ENDED}


def said(command: corral.Command) -> None:
    until(lambda: command.output() == b"said\n", 30)


def gone(box: corral.Sandbox) -> None:
    until(lambda: box.refresh().state == State.ENDED, 60)


def host_and_list_agree(server: Server, client: corral.Client) -> None:
    until(lambda: sandbox_cgroups(server.node_id) == set(live(client)), 60, "host objects match the list")


def test_the_daemon_dies_among_creates(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client):
        begun = threading.Semaphore(0)

        def create(number: int) -> corral.Sandbox | corral.CorralError:
            begun.release()
            try:
                return client.sandboxes.create(
                    "bb", limits=TINY, labels={"n": str(number)}, idempotency_key=f"create-{number}"
                )
            except corral.CorralError as error:
                return error

        with ThreadPoolExecutor(MANY) as pool:
            results = [pool.submit(create, n) for n in range(MANY)]
            for _ in range(MANY // 2):
                begun.acquire()
            until(lambda: any(r.done() for r in results), 60, "the first is made")
            server.kill()
            server.start()
            made = [r.result(300) for r in results]
        found = live(client)
        by_number: dict[str, list[str]] = {}
        for sandbox in found.values():
            by_number.setdefault(sandbox.labels["n"], []).append(sandbox.id)
        assert all(len(ids) == 1 for ids in by_number.values()), "none is doubled"
        for number, result in enumerate(made):
            if isinstance(result, corral.Sandbox):
                assert by_number.get(str(number)) == [result.id], f"what succeeded is there: {result.refresh()}"
                assert found[result.id].state == State.RUNNING
            else:
                assert result.kind in {"overloaded", "unavailable", "start_failed"}, result
        host_and_list_agree(server, client)
        for sandbox in list(found.values())[:10]:
            assert sandbox.exec("echo alive", timeout=60).stdout == "alive\n"


def test_running_commands_survive_the_daemon(tmp_path: Path) -> None:
    lines = 400
    with node(tmp_path) as (server, client):
        specs = [corral.SandboxSpec(environment="bb", limits=TINY)] * MANY
        made = client.sandboxes.create_many(specs)
        boxes = [s for s in made if isinstance(s, corral.Sandbox)]
        assert len(boxes) == MANY, [s for s in made if not isinstance(s, corral.Sandbox)][:3]
        script = (
            f"n=0; while [ $n -lt {lines} ]; do echo line $n; echo note $n >&2; n=$((n+1)); [ $n -eq 20 ] && "
            "while [ ! -e /tmp/go ]; do sleep 0.2; done; done; exit 5"
        )
        with ThreadPoolExecutor(32) as pool:
            commands = list(pool.map(lambda box: box.start(script, step_key="the-step"), boxes))
            until(lambda: b"line 19" in commands[-1].output(), 60)
            before = {box.id for box in boxes}
            server.kill()
            server.start()
            assert set(live(client)) == before, "every live sandbox is adopted"
            assert all(s.state == State.RUNNING for s in live(client).values())
            list(pool.map(lambda box: box.files.write("/tmp/go", ""), boxes))
            out = "".join(f"line {n}\n" for n in range(lines))
            err = "".join(f"note {n}\n" for n in range(lines))
            for result in pool.map(lambda command: command.result(), commands):
                assert (result.exit_code, result.stdout, result.stderr) == (5, out, err)
            again = boxes[0].exec(script, step_key="another")
            assert again.exit_code == 5, "the sandbox takes commands as before"
            assert boxes[1].start(script, step_key="the-step").id == commands[1].id, "step keys are kept"
        host_and_list_agree(server, client)


def test_commands_that_end_while_the_daemon_is_down(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client):
        box = client.sandboxes.create("bb", limits=SMALL)
        commands = [
            box.start("until [ -e /tmp/down ]; do sleep 0.1; done; echo ended; exit 3", open_stdin=True),
            box.start("until [ -e /tmp/down ]; do sleep 0.1; done; head -c 3000000 /dev/zero; exit 4"),
            box.start("until [ -e /tmp/down ]; do sleep 0.1; done; kill -9 $$"),
            box.start(["cat"], open_stdin=True),
        ]
        commands[3].write_stdin("before ")
        box.start("sleep 1; touch /tmp/down")
        server.kill()
        # The keepers know when: the files they write are the only witness from here.
        logs = server.data / "logs"
        until(lambda: sum(f.stat().st_size for f in logs.rglob("*") if f.is_file()) > 3_000_000, 60)
        server.start()
        results = [command.result() for command in commands[:3]]
        assert [r.exit_code for r in results] == [3, 4, 137]
        assert results[0].stdout == "ended\n"
        assert len(results[1].stdout_bytes) == 3_000_000
        commands[3].write_stdin("after", close=True)
        assert commands[3].result().stdout == "before after"


def test_limits_and_times_hold_after_a_restart(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client):
        box = client.sandboxes.create("bb", limits=SMALL, max_ttl=600)
        late = box.start("sleep 1000", timeout=3)
        with box.session() as shell:
            shell.run("cd /tmp; V=kept")
            paused = client.sandboxes.create("bb", limits=SMALL, auto_resume=False)
            paused.pause()
            short = client.sandboxes.create("bb", limits=SMALL, max_ttl=4)
            server.kill()
            server.start()
            end = late.wait(60).end
            assert end is not None
            assert end.type == OutcomeType.TIMED_OUT
            assert shell.run("echo $V $PWD", timeout=30).stdout == "kept /tmp\n"
            assert paused.refresh().state == State.PAUSED
            until(lambda: short.refresh().state == State.ENDED, 60)
            assert short.status.end is not None
            assert short.status.end.reason == "max_ttl"
        assert client.events.page(sandbox_id=box.id).events[0].type == "state", "events are kept"


def test_the_keepers_die(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client):
        boxes = [client.sandboxes.create("bb", limits=SMALL) for _ in range(5)]
        commands = [box.start("echo said; sleep 1000") for box in boxes]
        for command in commands:
            said(command)
        for pid in server.keepers():
            os.kill(pid, signal.SIGKILL)
        for box, command in zip(boxes, commands, strict=True):
            gone(box)
            assert box.status.end is not None
            assert (box.status.end.reason, box.status.end.infra_failed) == ("keeper_lost", True)
            assert command.output() == b"said\n", "what it wrote stays"
        fresh = client.sandboxes.create("bb", limits=SMALL)
        assert fresh.exec("echo new").stdout == "new\n"
        host_and_list_agree(server, client)


def test_both_die(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client):
        boxes = [client.sandboxes.create("bb", limits=SMALL) for _ in range(5)]
        command = boxes[0].start("echo said; sleep 1000")
        said(command)
        keepers = server.keepers()
        server.kill()
        for pid in keepers:
            os.kill(pid, signal.SIGKILL)
        server.start()
        for box in boxes:
            gone(box)
            assert box.status.end is not None
            assert box.status.end.infra_failed
        end = command.refresh().end
        assert end is not None
        assert end.type in {OutcomeType.OUTCOME_UNKNOWN, OutcomeType.SANDBOX_ENDED}
        host_and_list_agree(server, client)
        assert client.sandboxes.create("bb", limits=SMALL).exec("echo new").stdout == "new\n"


@pytest.mark.parametrize("damage", ["overwritten", "truncated", "removed"])
def test_a_damaged_ledger(tmp_path: Path, damage: str) -> None:
    with node(tmp_path) as (server, client):
        for _ in range(3):
            client.sandboxes.create("bb", limits=SMALL).start("sleep 1000")
        server.kill()
        for file in server.data.glob("ledger.db*"):
            if damage == "removed":
                file.unlink()
            elif damage == "truncated":
                os.truncate(file, file.stat().st_size // 2)
            else:
                file.write_bytes(os.urandom(file.stat().st_size))
        server.start()
        host_and_list_agree(server, client)
        box = client.sandboxes.create("bb", limits=SMALL)
        assert box.exec("echo new").stdout == "new\n"
        host_and_list_agree(server, client)


def test_the_ledger_is_whole_after_a_kill(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client):
        for _ in range(5):
            client.sandboxes.create("bb", limits=TINY).delete()
        server.kill()
        check = sqlite3.connect(server.data / "ledger.db").execute("PRAGMA integrity_check").fetchone()
        assert check == ("ok",)
        server.start()
        assert len(list(client.sandboxes.list(state="ended"))) == 5, "ended ones stay readable"


def test_a_second_daemon_on_the_same_data_is_refused(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client):
        second = server.cli("up", "--data-dir", str(server.data), "--listen", "127.0.0.1:0")
        assert second.returncode == 1
        assert b"in use" in second.stderr
        assert client.sandboxes.create("bb", limits=TINY).exec("echo fine").stdout == "fine\n"


def test_sigterm_leaves_sandboxes_running(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client):
        box = client.sandboxes.create("bb", limits=SMALL)
        command = box.start("until [ -e /tmp/go ]; do sleep 0.1; done; echo through")
        assert server.stop() == 0
        server.start()
        box.files.write("/tmp/go", "")
        assert command.result().stdout == "through\n"


def test_keepers_that_are_stopped(tmp_path: Path) -> None:
    """A node does not wait for ever for keepers that do not answer, and loses nothing by it."""
    with node(tmp_path) as (server, client):
        box = client.sandboxes.create("bb", limits=TINY)
        sleeper = box.start("sleep 1000")
        keepers = server.keepers()
        server.kill()
        for pid in keepers:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(RuntimeError, match="does not answer"):
                server.start()
        finally:
            for pid in keepers:
                os.kill(pid, signal.SIGCONT)
        server.start()
        assert sorted(server.keepers()) == sorted(keepers)
        assert sleeper.refresh().running
        assert box.exec("echo here").stdout == "here\n"


def test_a_keeper_that_stops_while_the_node_runs(tmp_path: Path) -> None:
    """Requests that need it are refused instead of hanging; when it goes on, so do they."""
    with node(tmp_path) as (server, client):
        box, other = (client.sandboxes.create("bb", limits=TINY) for _ in range(2))
        sleeper = box.start("sleep 1000")
        keepers = server.keepers()
        for pid in keepers:
            os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: server.log.read_text().count("a keeper does not answer") == len(keepers), 60)
            with server.client(retry=RetryPolicy(attempts=1)) as hasty:
                with pytest.raises(corral.Unavailable, match="does not answer"):
                    hasty.sandboxes.get(box.id).exec("echo now")
            assert sleeper.refresh().running
            # Its sandboxes can be ended nevertheless; it forgets them when it goes on.
            gone = client.sandboxes.get(other.id)
            assert gone.delete().state == State.ENDED
        finally:
            for pid in keepers:
                os.kill(pid, signal.SIGCONT)
        until(lambda: server.log.read_text().count("a keeper answers again") == len(keepers), 60)
        assert box.exec("echo here").stdout == "here\n"
        with ThreadPoolExecutor(1) as pool:
            # One that was under way when it stopped: nobody waits for ever, and it does not run twice.
            for pid in keepers:
                os.kill(pid, signal.SIGSTOP)
            try:
                asked = pool.submit(box.exec, "echo once >> /tmp/once", step_key="once")
                with pytest.raises(corral.CorralError):
                    asked.result(90)
            finally:
                for pid in keepers:
                    os.kill(pid, signal.SIGCONT)
        until(lambda: server.log.read_text().count("a keeper answers again") == 2 * len(keepers), 60)
        until(lambda: box.exec("cat /tmp/once").stdout == "once\n", 30)
        assert box.exec("echo once >> /tmp/once", step_key="once").ok
        assert box.exec("cat /tmp/once").stdout == "once\n"
        assert client.sandboxes.create("bb", limits=TINY).exec("echo new").ok


def test_down_ends_what_stays(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client):
        boxes = [client.sandboxes.create("bb", limits=TINY) for _ in range(3)]
        boxes[0].start("sleep 1000")
        where = ("--data-dir", str(server.data))
        refused = server.cli("down", *where)
        assert refused.returncode == 1
        assert b"in use" in refused.stderr
        server.stop()
        assert server.keepers()
        done = server.cli("--json", "down", *where)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["ended"], told["left"]) == (3, [])
        assert not any(server.remains().values()), server.remains()
        assert server.cli("down", *where).returncode == 0, "again does no harm"
        nothing = server.cli("down", "--data-dir", str(tmp_path))
        assert nothing.returncode == 1
        assert b"no data directory" in nothing.stderr
        server.start()
        for box in boxes:
            end = client.sandboxes.get(box.id).status.end
            assert end is not None
            assert end.reason == corral.EndReason.STOPPED
        assert client.sandboxes.create("bb", limits=TINY).exec("echo again").ok


def test_down_ends_keepers_that_are_stopped(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client):
        client.sandboxes.create("bb", limits=TINY)
        server.stop()
        for pid in server.keepers():
            os.kill(pid, signal.SIGSTOP)
        done = server.cli("--json", "down", "--data-dir", str(server.data))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"data_dir": str(server.data), "ended": 1, "left": []}
        assert not any(server.remains().values()), server.remains()
        server.start()


def test_a_smaller_limit_ends_nobody(tmp_path: Path) -> None:
    """Keepers of an earlier run with a higher limit are taken over, too."""
    with node(tmp_path) as (server, client):
        box = client.sandboxes.create("bb", limits=TINY)
        server.stop()
        [first, second] = (server.data / "run" / f"keeper-{n}.sock" for n in (0, 1))
        used = first if first.exists() else second
        used.rename(used.with_name("keeper-7.sock"))
        record = sqlite3.connect(server.data / "ledger.db")
        record.execute("UPDATE sandboxes SET record = json_set(record, '$.keeper', 7) WHERE id = ?", [box.id])
        record.commit()
        record.close()
        server.options = ("--max-live", "10")
        server.start()
        assert box.refresh().state == State.RUNNING
        assert box.exec("echo here").stdout == "here\n"
        box.delete()


def test_a_sessions_command_survives_the_daemon(tmp_path: Path) -> None:
    """It goes on, its result is its own, and the next command's is the next one's."""
    with node(tmp_path) as (server, client):
        box = client.sandboxes.create("bb", limits=SMALL)
        session = box.session()
        session.run("cd /tmp; kept=yes")
        script = "echo begun; touch /tmp/begun; until [ -e go ]; do sleep 0.1; done; echo old; (exit 3)"
        with ThreadPoolExecutor(2) as pool:
            # Its client asks again under the step key when the answer is lost.
            running = pool.submit(session.run, script, step_key="old")
            until(lambda: "begun" in [entry.path for entry in box.files.list("/tmp")], 30)
            [old] = [command for command in box.commands() if command.status.step_key == "old"]
            server.kill()
            server.start()
            following = pool.submit(session.run, "echo new $kept; (exit 4)")
            box.files.write("/tmp/go", "")
            first, second = running.result(120), following.result(120)
        assert first.command.id == old.id, "it does not run twice"
        assert (first.exit_code, first.stdout) == (3, "begun\nold\n")
        assert (second.exit_code, second.stdout) == (4, "new yes\n")
