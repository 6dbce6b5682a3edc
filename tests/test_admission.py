"""What a full node says, and large outputs: each on a node of its own, since they change how a node behaves."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

import corral
from support import Server, cgroup_roots, rss_bytes, sandbox_cgroups, until, with_busybox

TINY = corral.Limits(memory_mib=64, cpus=1.0, pids=32, disk_mib=64)
ONCE = corral.RetryPolicy(attempts=1)


def refused(client: corral.Client) -> corral.CorralError:
    with pytest.raises(corral.CorralError) as caught:
        client.sandboxes.create("bb", limits=TINY)
    return caught.value


@contextmanager
def node(*options: str, **client_options: Any) -> Iterator[tuple[Server, corral.Client]]:
    """A node with the small image, of which nothing may be left."""
    server = Server(True, *options)
    with with_busybox(server, server.scratch, **client_options) as client:
        yield server, client
        assert server.stop() == 0


def test_a_full_node_refuses_and_takes_again() -> None:
    with node("--max-live", "2", retry=ONCE) as (_, client):
        first, second = (client.sandboxes.create("bb", limits=TINY) for _ in range(2))
        error = refused(client)
        assert (error.kind, error.status, error.retryable) == ("overloaded", 429, True)
        assert error.retry_after is not None
        assert error.retry_after > 0
        assert second.exec("echo unmoved").stdout == "unmoved\n"
        first.delete()
        third = client.sandboxes.create("bb", limits=TINY)
        assert third.exec("true").ok


def test_too_little_memory_on_the_host_refuses() -> None:
    with node("--memory-floor-mib", str(1 << 24), retry=ONCE) as (_, client):
        error = refused(client)
        assert (error.kind, error.retryable) == ("overloaded", True)
        assert "memory" in error.message


def test_a_hundred_megabytes_of_output_in_constant_memory() -> None:
    size = 100_000_000
    with node() as (server, client):
        sandbox = client.sandboxes.create("bb", limits=TINY)
        before = rss_bytes(server.pid)
        script = f"yes abcdefg | head -c {size}"
        command = sandbox.start(script, max_output_bytes=2 * size)
        digest, count = hashlib.sha256(), 0
        for chunk in command.stream():
            digest.update(chunk.data)
            count += len(chunk.data)
        expected = hashlib.sha256((b"abcdefg\n" * (size // 8 + 1))[:size]).hexdigest()
        assert (count, digest.hexdigest()) == (size, expected)
        assert not command.wait().stdout.truncated
        assert rss_bytes(server.pid, "VmHWM") - before < 64 << 20


BURST = 64


@asynccontextmanager
async def burst(server: Server, policy: corral.RetryPolicy) -> AsyncIterator[list[corral.AsyncSandbox | BaseException]]:
    """Many creates at once; what they made is removed."""
    limits = corral.Limits(memory_mib=16, pids=16, disk_mib=8)
    async with corral.AsyncClient(server.url, server.key, retry=policy) as client:
        creates = [client.sandboxes.create("bb", limits=limits, max_ttl=600) for _ in range(BURST)]
        results = await asyncio.gather(*creates, return_exceptions=True)
        made = [r for r in results if isinstance(r, corral.AsyncSandbox)]
        yield results
        await asyncio.gather(*(sandbox.delete() for sandbox in made))


async def test_a_burst_over_a_full_start_queue() -> None:
    with node("--start-queue", "4") as (server, _):
        async with burst(server, ONCE) as results:
            made = {r.id for r in results if isinstance(r, corral.AsyncSandbox)}
            refused = [r for r in results if not isinstance(r, corral.AsyncSandbox)]
            assert made
            assert refused, "the queue was full"
            for error in refused:
                assert isinstance(error, corral.CorralError), error
                assert (error.kind, error.status, error.retryable) == ("overloaded", 429, True), error
                assert error.retry_after is not None
                assert error.retry_after > 0
            assert sandbox_cgroups(server.node_id) == made, "a refused create leaves nothing"
        assert not sandbox_cgroups(server.node_id)
        async with burst(server, corral.RetryPolicy()) as results:
            assert all(isinstance(r, corral.AsyncSandbox) for r in results), results


@pytest.mark.parametrize(
    "words", [("--start-queue", "0"), ("--keep-ended", "0s"), ("--keep-ended", "soon"), ("--disk-step-mib", "1")]
)
def test_options_that_make_no_sense(server: Server, words: tuple[str, str]) -> None:
    done = server.cli("up", "--ephemeral", *words)
    assert done.returncode == 2
    assert words[0].encode() in done.stderr


def test_the_oldest_output_of_a_sandbox_goes_first() -> None:
    """Many commands that write much do not fill the disk; what is gone is said to be."""
    with node("--keep-output-mib", "8") as (server, client):
        box = client.sandboxes.create("bb", limits=TINY)
        write = "head -c 3000000 /dev/zero; echo"
        results = [box.exec(write, step_key=str(n)) for n in range(6)]
        logs = server.data / "logs" / box.id
        until(lambda: sum(file.stat().st_size for file in logs.iterdir()) < 9 << 20, 30, "the oldest logs go")
        first, last = (box.command(results[n].command.id) for n in (0, -1))
        status = first.refresh()
        assert status.stdout.truncated
        assert (status.stdout.dropped_from, status.stdout.dropped_to) == (0, 3_000_001)
        assert first.output() == b""
        assert len(last.output()) == 3_000_001
        # What survivors of an ended command write counts, too.
        box.exec("(sleep 0.2; head -c 20000000 /dev/zero) & exit 0")
        box.exec("sleep 1; echo last")
        until(lambda: sum(file.stat().st_size for file in logs.iterdir()) < 9 << 20, 30, "a survivor's log goes")
        again = box.exec(write, step_key="0")
        assert again.command.id == first.id, "its result stays, and it does not run twice"
        assert (again.exit_code, again.stdout) == (0, "")
        # The same after a restart is the ledger's; a client sees no difference.
        assert [c.id for c in box.commands()][: len(results)] == [r.command.id for r in results]
        box.delete()


def test_ended_sandboxes_are_forgotten() -> None:
    with node("--keep-ended", "2s") as (server, client):
        logs, key = server.data / "logs", uuid.uuid4().hex
        live_key = uuid.uuid4().hex
        live = client.sandboxes.create("bb", limits=TINY, idempotency_key=live_key)
        spoken = live.exec("echo kept").command
        told = [event.seq for event in client.events.page(sandbox_id=live.id).events]
        gone = client.sandboxes.create("bb", limits=TINY, idempotency_key=key)
        gone.exec("echo forgotten")
        assert (logs / gone.id).is_dir()
        gone.delete()

        def forgotten() -> bool:
            try:
                client.sandboxes.get(gone.id)
            except corral.NotFound:
                return True
            return False

        until(forgotten, 60, "the record of the ended one")
        assert not (logs / gone.id).exists()
        assert live.command(spoken.id).output() == b"kept\n", "a live one keeps everything"
        assert [event.seq for event in client.events.page(sandbox_id=live.id).events][: len(told)] == told
        assert live.exec("echo alive").stdout == "alive\n"
        assert client.sandboxes.create("bb", limits=TINY, idempotency_key=live_key).id == live.id
        # Another body under the same key is a mismatch as long as the key is known.
        again = client.sandboxes.create("bb", limits=TINY, labels={"another": "body"}, idempotency_key=key)
        assert again.id != gone.id
        again.delete()
        live.delete()


def test_a_start_that_fails_leaves_no_control_groups() -> None:
    def groups() -> list[str]:
        return sorted(str(path) for top in cgroup_roots() for path in top.glob("**/corral-*"))

    before = groups()
    server = Server(False, "--disk-reserve-mib", str(1 << 30))
    try:
        with pytest.raises(RuntimeError, match="no room"):
            server.start()
        assert groups() == before
    finally:
        server.end()
