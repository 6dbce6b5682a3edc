"""The server of lazy reads and its holder end or stop together: readers wait, or are told whose fault it is."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import corral
from conftest import SMALL
from stores import lazy_processes, lose_layers, make_big, node, take_down
from support import Server, mounts, until

pytestmark = pytest.mark.timeout(300)

READ_ALL = "cd /big; for f in *; do md5sum $f; sleep 0.02; done"


@contextmanager
def far_layer(scratch: Path) -> Iterator[tuple[Server, corral.Client, str]]:
    """A node that has nothing of the layers of `big`, and the digests of its files."""
    with node(scratch) as (server, client, _):
        sums, _ = make_big(client)
        lose_layers(server)
        yield server, client, sums


def signal_all(server: Server, number: signal.Signals) -> None:
    pids = lazy_processes(server)
    assert len(pids) == 2, "holder and server"
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def lazy_mounts(server: Server) -> list[str]:
    return [line for line in mounts() if f"{server.data}/layers/lazy" in line]


def test_both_end_under_readers(tmp_path: Path) -> None:
    with far_layer(tmp_path) as (server, client, sums):
        with client.sandboxes.create("big", limits=SMALL) as box:
            reader = box.start(f"for i in 1 2 3 4 5 6 7 8; do {READ_ALL}; done")
            killed = 0
            while reader.refresh().running:
                time.sleep(0.5)
                with contextlib.suppress(AssertionError):  # others are being started
                    signal_all(server, signal.SIGKILL)
                    killed += 1
            assert killed > 2
            assert sorted(reader.output().decode().splitlines()) == sorted(sums.splitlines() * 8)
            assert reader.result().exit_code == 0
            events = [event.type for event in client.events.page(sandbox_id=box.id).events]
            assert "read_failed" not in events
            until(lambda: len(lazy_processes(server)) == 2)
            assert "others go on, readers waited" in server.log.read_text()
            # New sandboxes come by those that were started.
            with client.sandboxes.create("big", limits=SMALL) as other:
                assert other.exec("cd /big; md5sum *").stdout == sums
        assert server.stop() == 0
        take_down(server)
        server.start()


def test_both_stand_still(tmp_path: Path) -> None:
    with far_layer(tmp_path) as (server, client, sums):
        with client.sandboxes.create("big", limits=SMALL) as box:
            assert box.exec("md5sum /big/7").ok
            before = lazy_processes(server)
            signal_all(server, signal.SIGSTOP)
            assert box.exec("cd /big; md5sum *", timeout=120).stdout == sums
            assert not set(before) & set(lazy_processes(server))
            assert "stand still: they are replaced" in server.log.read_text()
            # A node that starts meanwhile replaces them as well.
            signal_all(server, signal.SIGSTOP)
            server.kill()
            server.start()
            assert box.exec("cd /big; md5sum *", timeout=120).stdout == sums
            with client.sandboxes.create("big", limits=SMALL) as other:
                assert other.exec("cd /big; md5sum *").stdout == sums


def test_the_node_ends_with_them(tmp_path: Path) -> None:
    with far_layer(tmp_path) as (server, client, sums):
        reads = client.sandboxes.create("big", limits=SMALL)
        assert reads.exec("md5sum /big/7").ok
        server.kill()
        signal_all(server, signal.SIGKILL)
        until(lambda: not lazy_processes(server))
        server.start()
        end = client.sandboxes.get(reads.id).status.end
        assert end is not None
        assert (end.reason, end.cause, end.infra_failed) == ("storage_error", corral.Cause.PLATFORM, True)
        assert "the connection through which its layers were read was lost" in end.message
        assert len(lazy_mounts(server)) == 1
        with client.sandboxes.create("big", limits=SMALL) as other:
            assert other.exec("cd /big; md5sum *").stdout == sums


def test_a_node_taken_down_after_they_were_killed_leaves_nothing(tmp_path: Path) -> None:
    with far_layer(tmp_path) as (server, client, _):
        box = client.sandboxes.create("big", limits=SMALL)
        assert box.exec("md5sum /big/7").ok
        server.kill()
        signal_all(server, signal.SIGKILL)
        until(lambda: not lazy_processes(server))
        assert len(lazy_mounts(server)) == 1
        take_down(server)
        server.start()
        signal_all(server, signal.SIGSTOP)
        assert server.stop() == 0
        take_down(server)
        server.start()


def test_a_node_is_taken_down_while_reads_hang(tmp_path: Path) -> None:
    with far_layer(tmp_path) as (server, client, _):
        box = client.sandboxes.create("big", limits=SMALL)
        reader = box.start(READ_ALL)
        until(lambda: len(reader.output()) > 200)
        signal_all(server, signal.SIGSTOP)
        time.sleep(1)  # nothing can be waited for: a read that hangs tells nobody
        server.kill()
        take_down(server)
        server.start()


def test_an_operator_ends_them(tmp_path: Path) -> None:
    """Told to end, the holder takes the mount away: nothing can be read through it again."""
    with far_layer(tmp_path) as (server, client, sums):
        reads = client.sandboxes.create("big", limits=SMALL)
        assert reads.exec("md5sum /big/7").ok
        signal_all(server, signal.SIGTERM)
        until(lambda: reads.refresh().end is not None, 60, "its sandbox ends")
        assert reads.status.end is not None
        assert (reads.status.end.reason, reads.status.end.cause) == ("storage_error", corral.Cause.PLATFORM)
        with client.sandboxes.create("big", limits=SMALL) as other:
            assert other.exec("cd /big; md5sum *").stdout == sums
