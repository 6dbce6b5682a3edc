"""A host file system that others have filled: nothing new begins, and what runs goes on."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import corral
from support import Server, mounts, until, with_busybox

LIMITS = corral.Limits(memory_mib=64, cpus=1.0, pids=32, disk_mib=256)
OUTPUT = 4_000_000


@contextmanager
def small_disk(scratch: Path) -> Iterator[Path]:
    """A file system of 4 GiB in a sparse file."""
    image, mountpoint = scratch / "disk.ext4", scratch / "disk"
    image.touch()
    os.truncate(image, 4 << 30)
    mountpoint.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mountpoint)], check=True)
    try:
        yield mountpoint
    finally:
        subprocess.run(["umount", "-l", str(mountpoint)], check=True)
        image.unlink()


@contextmanager
def node(scratch: Path) -> Iterator[Server]:
    """A node whose data is on that file system, with the small image."""
    with small_disk(scratch) as disk:
        server = Server(False, "--disk-step-mib", "1024", "--disk-reserve-mib", "256")
        server.data = disk / "data"
        with with_busybox(server, scratch):
            yield server


def fill(disk: Path) -> Path:
    """Takes all but a megabyte of what root can have."""
    filler = disk / "filler"
    space = os.statvfs(disk)
    # ext4 keeps up to 4,096 blocks to itself, which it counts as free.
    wanted = (space.f_bfree - 4096) * space.f_frsize - (1 << 20)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, wanted)
    return filler


def is_writable(mountpoint: Path) -> bool:
    line = next(line for line in mounts() if line.split()[4] == str(mountpoint))
    return all(options.split(",")[0] == "rw" for options in (line.split()[5], line.split()[-1]))


def test_a_full_disk(tmp_path: Path) -> None:
    with node(tmp_path) as server, server.client(retry=corral.RetryPolicy(attempts=1)) as client:
        box = client.sandboxes.create("bb", limits=LIMITS)
        filler = fill(server.data.parent)
        for _ in range(5):
            with pytest.raises(corral.CorralError) as caught:
                client.sandboxes.create("bb", limits=LIMITS)
            error = caught.value
            assert (error.kind, error.status, error.retryable) == ("insufficient_storage", 507, True), error
            assert error.retry_after is not None
            assert error.retry_after > 0
        for number in range(20):
            assert box.exec(f"echo {number}").stdout == f"{number}\n"
        assert box.exec("dd if=/dev/zero of=/mine bs=1M count=150 && sync", timeout=120).ok
        box.files.write("/outside", b"x" * 1_000_000)
        assert len(box.files.read_bytes("/outside")) == 1_000_000
        told = box.exec(f"head -c {OUTPUT} /dev/zero", timeout=60)
        assert (len(told.stdout_bytes), told.truncated) == (OUTPUT, False)
        assert is_writable(server.data / "writable")
        filler.unlink()
        another = client.sandboxes.create("bb", limits=LIMITS)
        assert another.exec("echo room").stdout == "room\n"
        assert box.exec("wc -c < /mine").stdout.strip() == str(150 << 20)


def fill_all(disk: Path) -> list[Path]:
    """Takes everything, also what is given up for what runs, until nothing more comes."""
    fillers = []
    for number in range(200):
        filler = disk / f"filler-{number}"
        fillers.append(filler)
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * (1 << 20))
                file.flush()
                os.fsync(file.fileno())
        if os.statvfs(disk).f_bfree < 16 and number > 20:
            break
        time.sleep(0.05)
    return fillers


def test_ends_are_kept_for_a_ledger_that_takes_nothing(tmp_path: Path) -> None:
    with node(tmp_path) as server, server.client(retry=corral.RetryPolicy(attempts=1)) as client:
        boxes = [client.sandboxes.create("bb", limits=LIMITS) for _ in range(3)]
        fillers = fill_all(server.data.parent)
        ended = [box for box in boxes[:2] if box.delete().state == corral.State.ENDED]
        assert len(ended) == 2
        for filler in fillers:
            filler.unlink()
        until(lambda: all(client.sandboxes.get(box.id).state == corral.State.ENDED for box in ended), 30)
        server.kill()
        server.start()
        assert [client.sandboxes.get(box.id).status.end.reason for box in ended] == [corral.EndReason.STOPPED] * 2  # type: ignore[union-attr]
        assert boxes[2].exec("echo on").stdout == "on\n"


def test_down_needs_no_room(tmp_path: Path) -> None:
    with node(tmp_path) as server, server.client() as client:
        box = client.sandboxes.create("bb", limits=LIMITS)
        box.start("sleep 1000")
        image = server.data / "writable.btrfs"
        size = image.stat().st_size
        server.stop()
        fillers = fill_all(server.data.parent)
        done = server.cli("--json", "down", "--data-dir", str(server.data))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["ended"] == 1
        assert not any(server.remains().values()), server.remains()
        assert image.stat().st_size == size, "nothing is taken of the host"
        for filler in fillers:
            filler.unlink()
        server.start()
        assert box.refresh().state == corral.State.ENDED
