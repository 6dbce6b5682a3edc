"""A sandbox's life: states, ends and their reasons, idempotence, lists, events."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import corral
from conftest import Make
from corral import EndReason, State
from support import Server, until


def ended(sandbox: corral.Sandbox) -> bool:
    return sandbox.refresh().state == State.ENDED


def test_from_running_to_ended(make: Make) -> None:
    sandbox = make()
    status = sandbox.status
    assert status.state == State.RUNNING
    assert status.started_at is not None
    assert status.created_at is not None
    assert status.created_at <= status.started_at
    gone = sandbox.delete()
    assert gone.state == State.ENDED
    assert gone.end is not None
    assert (gone.end.reason, gone.end.cause, gone.end.infra_failed) == (EndReason.STOPPED, corral.Cause.CLIENT, False)
    assert sandbox.refresh() == gone, "an ended sandbox stays readable"
    assert sandbox.delete() == gone, "ending it again changes nothing"
    with pytest.raises(corral.SandboxEnded) as caught:
        sandbox.exec("true")
    assert caught.value.sandbox_id == sandbox.id
    with pytest.raises(corral.SandboxEnded):
        sandbox.files.read("/etc/passwd")


def test_the_output_of_an_ended_sandbox_stays_readable(make: Make) -> None:
    sandbox = make()
    result = sandbox.exec("echo kept; echo too >&2")
    sandbox.delete()
    command = sandbox.command(result.command.id)
    assert command.output() == b"kept\n"
    assert command.output("stderr") == b"too\n"
    assert command.result().exit_code == 0
    assert [c.id for c in sandbox.commands()] == [command.id]


def test_a_key_names_one_sandbox(client: corral.Client, make: Make) -> None:
    key = uuid.uuid4().hex
    first = make(idempotency_key=key)
    again = client.sandboxes.create(
        "bb", limits=corral.Limits(memory_mib=128, cpus=1.0, pids=64, disk_mib=64), max_ttl=900, idempotency_key=key
    )
    assert again.id == first.id
    with pytest.raises(corral.IdempotencyMismatch):
        client.sandboxes.create("bb", labels={"another": "body"}, idempotency_key=key)


def test_a_key_used_by_many_at_once_names_one_sandbox(client: corral.Client, bb: str) -> None:
    key = uuid.uuid4().hex
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: client.sandboxes.create(bb, idempotency_key=key, max_ttl=600), range(16)))
    try:
        assert len({s.id for s in made}) == 1
    finally:
        made[0].delete()


def test_idle_time_ends_it(client: corral.Client, make: Make) -> None:
    sandbox = make(idle_ttl=1)

    def gone() -> corral.Sandbox | None:
        """Looks at it by a list, which is no use of it."""
        return next((s for s in client.sandboxes.list(state="ended") if s.id == sandbox.id), None)

    end = until(gone, 30, "the idle sandbox ends").status.end
    assert end is not None
    assert (end.reason, end.infra_failed) == (EndReason.IDLE_TTL, False)


def test_use_keeps_it_from_being_idle(make: Make) -> None:
    sandbox = make(idle_ttl=2)
    assert sandbox.exec("sleep 4", timeout=60).exit_code == 0, "a running command is use"
    assert sandbox.refresh().state == State.RUNNING


def test_its_longest_life_ends_it_under_a_command(make: Make) -> None:
    sandbox = make(max_ttl=1.5)
    with pytest.raises(corral.SandboxEnded):
        print(sandbox.exec("sleep 100", timeout=120))
    until(lambda: ended(sandbox), 30)
    assert sandbox.status.end is not None
    assert sandbox.status.end.reason == EndReason.MAX_TTL


def test_times_can_be_changed(make: Make) -> None:
    sandbox = make(max_ttl=600)
    assert sandbox.set_ttl(idle=50).idle_ttl_ms == 50_000
    assert sandbox.status.max_ttl_ms == 600_000, "what is not named stays"
    sandbox.set_ttl(total=0.001)
    until(lambda: ended(sandbox), 30)
    assert sandbox.status.end is not None
    assert sandbox.status.end.reason == EndReason.MAX_TTL


def test_pause_stops_time_and_resume_lets_it_go_on(make: Make) -> None:
    sandbox = make(auto_resume=False)
    counter = sandbox.start("n=0; while :; do n=$((n+1)); echo $n > /tmp/n; sleep 0.05; done")
    until(lambda: sandbox.exec("cat /tmp/n 2>/dev/null").stdout.strip(), 30)
    assert sandbox.pause().state == State.PAUSED
    assert sandbox.pause().state == State.PAUSED, "twice is once"
    with pytest.raises(corral.Conflict):
        sandbox.exec("true")
    used = sandbox.stats().cpu_ms
    time.sleep(0.5)  # nothing can be waited for: that nothing happens is what is tested
    assert sandbox.stats().cpu_ms == used
    assert sandbox.resume().state == State.RUNNING
    before = int(sandbox.exec("cat /tmp/n").stdout)
    until(lambda: int(sandbox.exec("cat /tmp/n").stdout or 0) > before, 30)
    counter.kill()
    assert not counter.wait(30).running


def test_requests_wake_a_paused_sandbox(make: Make) -> None:
    sandbox = make()
    sandbox.pause()
    assert sandbox.refresh().state == State.PAUSED, "looking at it does not"
    assert sandbox.exec("echo awake").stdout == "awake\n"
    assert sandbox.refresh().state == State.RUNNING


def test_a_paused_sandbox_can_be_removed(make: Make) -> None:
    sandbox = make()
    sandbox.start("sleep 1000")
    sandbox.pause()
    assert sandbox.delete().state == State.ENDED


def test_lists_filter_and_page(client: corral.Client, make: Make) -> None:
    mark = uuid.uuid4().hex
    made = [make(labels={"mark": mark, "odd": str(n % 2)}) for n in range(5)]
    ids = sorted(s.id for s in made)
    assert [s.id for s in client.sandboxes.list(labels={"mark": mark}, page_size=2)] == ids
    odd = client.sandboxes.list(labels={"mark": mark, "odd": "1"})
    assert sorted(s.id for s in odd) == sorted(made[n].id for n in (1, 3))
    made[0].delete()
    running = client.sandboxes.list(labels={"mark": mark}, state=State.RUNNING)
    assert sorted(s.id for s in running) == sorted(s.id for s in made[1:])
    assert [s.id for s in client.sandboxes.list(labels={"mark": mark}, state="ended")] == [made[0].id]
    assert not list(client.sandboxes.list(labels={"mark": mark}, environment="other"))


def test_an_end_is_listed_however_slow_the_ledger_is(server: Server, client: corral.Client, make: Make) -> None:
    mark = uuid.uuid4().hex
    sandbox = make(labels={"mark": mark})
    with contextlib.closing(sqlite3.connect(server.data / "ledger.db", isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")  # the node's own writes wait for this one
        sandbox.delete()
        assert not list(client.sandboxes.list(labels={"mark": mark}))
        with ThreadPoolExecutor(1) as pool:
            listed = pool.submit(lambda: list(client.sandboxes.list(labels={"mark": mark}, state=State.ENDED)))
            time.sleep(0.5)  # the question is on its way when the ledger is free again
            holder.execute("ROLLBACK")
            assert [s.id for s in listed.result(timeout=30)] == [sandbox.id]


def test_events_tell_a_life_in_order(client: corral.Client, make: Make) -> None:
    sandbox = make()
    command = sandbox.exec("exit 3").command
    sandbox.delete()
    page = client.events.page(sandbox_id=sandbox.id)
    told = [(e.type, str(e.state) if e.state else e.command_id) for e in page.events]
    states = [what for kind, what in told if kind == "state"]
    assert states[-1] == "ended"
    assert "running" in states
    assert ("command_started", command.id) in told
    last = [e for e in page.events if e.type == "command_ended"]
    assert last[0].outcome is not None
    assert last[0].outcome.code == 3
    numbers = [e.seq for e in page.events]
    assert numbers == sorted(set(numbers))
    rest = client.events.page(sandbox_id=sandbox.id, after=numbers[1])
    assert [e.seq for e in rest.events] == numbers[2:]
    following = client.events.follow(after=numbers[0] - 1, sandbox_id=sandbox.id)
    assert [next(following).seq for _ in numbers] == numbers
    following.close()


def test_events_come_as_they_happen(client: corral.Client, make: Make) -> None:
    sandbox = make()
    last = client.events.page(limit=1).last_seq
    with ThreadPoolExecutor(1) as pool:
        events = client.events.follow(after=last, sandbox_id=sandbox.id)

        def wait() -> corral.Event:
            return next(e for e in events if e.state == State.ENDED)

        waiting = pool.submit(wait)
        sandbox.delete()
        assert waiting.result(30).sandbox_id == sandbox.id
        events.close()


def test_many_at_once_each_with_its_result(client: corral.Client, bb: str) -> None:
    good = corral.SandboxSpec(environment=bb, limits=corral.Limits(memory_mib=32, pids=16, disk_mib=16), max_ttl=600)
    bad = corral.SandboxSpec(environment="no-such-environment")
    results = client.sandboxes.create_many([good, bad, good])
    try:
        assert isinstance(results[0], corral.Sandbox)
        assert isinstance(results[1], corral.NotFound)
        assert isinstance(results[2], corral.Sandbox)
        assert results[2].exec("echo x").stdout == "x\n"
    finally:
        for made in results:
            if isinstance(made, corral.Sandbox):
                made.delete()


def test_names_that_are_none(client: corral.Client) -> None:
    with pytest.raises(corral.NotFound):
        client.sandboxes.get("sabcd0000000000000000000a")
    for odd in ("x", "s../../etc", "S" * 20):
        with pytest.raises((corral.NotFound, corral.InvalidRequest)):
            client.sandboxes.get(odd)
    with pytest.raises(corral.NotFound):
        client.sandboxes.create("never-imported")


@pytest.mark.timeout(600)
async def test_a_thousand_from_one_process(server: Server, bb: str) -> None:
    async with corral.AsyncClient(server.url, server.key) as c:

        async def one(n: int) -> str:
            limits = corral.Limits(memory_mib=16, pids=16, disk_mib=8)
            async with await c.sandboxes.create(bb, limits=limits, max_ttl=600) as sandbox:
                return (await sandbox.exec(["echo", str(n)], timeout=60)).stdout.strip()

        assert await asyncio.gather(*(one(n) for n in range(1000))) == [str(n) for n in range(1000)]


def test_what_races_with_the_end_is_answered(make: Make) -> None:
    """A command or upload that meets the end of its sandbox is told so, and nobody waits for ever."""
    seen: set[str] = set()

    def act(call: Callable[[], object]) -> None:
        try:
            call()
        except corral.CorralError as error:
            seen.add(error.kind)

    with ThreadPoolExecutor(12) as pool:
        for number in range(24):
            sandbox = make()
            calls: list[Callable[[], object]] = [
                lambda s=sandbox: s.exec(["true"]),  # type: ignore[misc]
                lambda s=sandbox: s.files.write("/tmp/x", "y" * 100_000),  # type: ignore[misc]
                lambda s=sandbox: s.files.list("/"),  # type: ignore[misc]
            ]
            running = [pool.submit(act, call) for call in calls * 4]
            time.sleep(number % 8 / 1000)
            sandbox.delete()
            for future in running:
                future.result(60)
    assert seen <= {"sandbox_ended"}, seen
