"""What a full node says, and large outputs: each on a node of its own, since they change how a node behaves."""

from __future__ import annotations

import hashlib

import pytest

import corral
from support import Server, busybox_rootfs, rss_bytes

TINY = corral.Limits(memory_mib=64, cpus=1.0, pids=32, disk_mib=64)


def serving(*options: str) -> Server:
    return Server(True, *options).start()


def import_busybox(server: Server, client: corral.Client) -> None:
    file = server.scratch / "bb.tar"
    file.write_bytes(busybox_rootfs())
    client.images.import_file(file, "bb", kind="rootfs")


def refused(client: corral.Client) -> corral.CorralError:
    with pytest.raises(corral.CorralError) as caught:
        client.sandboxes.create("bb", limits=TINY)
    return caught.value


def test_a_full_node_refuses_and_takes_again() -> None:
    server = serving("--max-live", "2")
    try:
        with server.client(retry=corral.RetryPolicy(attempts=1)) as client:
            import_busybox(server, client)
            first, second = (client.sandboxes.create("bb", limits=TINY) for _ in range(2))
            error = refused(client)
            assert (error.kind, error.status, error.retryable) == ("overloaded", 429, True)
            assert error.retry_after is not None
            assert error.retry_after > 0
            assert second.exec("echo unmoved").stdout == "unmoved\n"
            first.delete()
            third = client.sandboxes.create("bb", limits=TINY)
            assert third.exec("true").ok
        assert server.stop() == 0
        assert not any(server.remains().values()), server.remains()
    finally:
        server.end()


def test_too_little_memory_on_the_host_refuses() -> None:
    server = serving("--memory-floor-mib", str(1 << 24))
    try:
        with server.client(retry=corral.RetryPolicy(attempts=1)) as client:
            import_busybox(server, client)
            error = refused(client)
            assert (error.kind, error.retryable) == ("overloaded", True)
            assert "memory" in error.message
        assert server.stop() == 0
    finally:
        server.end()


def test_a_hundred_megabytes_of_output_in_constant_memory() -> None:
    size = 100_000_000
    server = serving()
    try:
        with server.client() as client:
            import_busybox(server, client)
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
        assert server.stop() == 0
    finally:
        server.end()
