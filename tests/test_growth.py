"""Thousands of lives one after the other leave the host and the daemon as they were."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import corral
from support import Server, mounts, open_files, rss_bytes, sandbox_cgroups, until

CYCLES = int(os.environ.get("CORRAL_TEST_CYCLES", "5000"))
TINY = corral.Limits(memory_mib=64, pids=32, disk_mib=32)


@dataclass
class Use:
    """What a node takes of its host."""

    daemon_files: int
    keeper_files: int
    keepers: int
    places: int
    """Directories of sandboxes in what a keeper shares among them: terminals and shared memory."""
    mounts: int
    cgroups: int
    daemon_rss: int
    keeper_rss: int
    disk: int


def use(server: Server) -> Use:
    keepers = server.keepers()
    space = next((m.split()[4] for m in mounts() if str(server.data) in m and "btrfs" in m), str(server.data))
    return Use(
        daemon_files=open_files(server.pid),
        keeper_files=sum(open_files(pid) for pid in keepers),
        keepers=len(keepers),
        places=sum(len(os.listdir(f"/proc/{pid}/root/{name}")) for pid in keepers for name in ("pts", "shm")),
        mounts=len(mounts()),
        cgroups=len(sandbox_cgroups(server.node_id)),
        daemon_rss=rss_bytes(server.pid),
        keeper_rss=sum(rss_bytes(pid) for pid in keepers),
        disk=shutil.disk_usage(space).used,
    )


def kernel_cgroups() -> int:
    """Control groups of the memory controller, those included that are removed but still charged with page cache."""
    rows = (line.split() for line in Path("/proc/cgroups").read_text().splitlines())
    return next(int(row[2]) for row in rows if row[0] == "memory")


def cgroups_without_cache() -> int:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    return kernel_cgroups()


@pytest.mark.timeout(1800)
def test_nothing_grows(server: Server, client: corral.Client, bb: str, tmp_path: Path) -> None:
    def cycle(number: int) -> None:
        sandbox = client.sandboxes.create(bb, limits=TINY, max_ttl=600)
        try:
            result = sandbox.exec(f"echo {number} > /tmp/f; cat /tmp/f", timeout=120)
            assert result.stdout == f"{number}\n", (number, result.exit_code, result.stderr)
        finally:
            sandbox.delete()

    def settled() -> Use:
        until(lambda: sandbox_cgroups(server.node_id) == {s.id for s in client.sandboxes.list(state="running")}, 60)
        return use(server)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cycle, range(min(500, CYCLES))))
        before = settled()
        groups = cgroups_without_cache()
        list(pool.map(cycle, range(CYCLES)))
    after = settled()
    held = kernel_cgroups()
    # What the kernel frees late is free within moments.
    until(lambda: cgroups_without_cache() <= groups + 10, 60, f"the kernel's {held} control groups go back to {groups}")
    print(f"\n{CYCLES} cycles: {before} -> {after}; kernel's control groups {groups} -> {held} -> {kernel_cgroups()}")
    assert after.cgroups == before.cgroups
    assert after.keepers == before.keepers
    assert after.places == before.places
    assert after.daemon_files <= before.daemon_files + 20
    assert after.keeper_files <= before.keeper_files + 20
    assert after.mounts <= before.mounts + 5
    assert after.keeper_rss <= before.keeper_rss + (4 << 20)
    # Records of what has ended stay for a day: a little for each cycle, no more.
    assert after.daemon_rss <= before.daemon_rss + (48 << 20) + CYCLES * 4096
    assert after.disk <= before.disk + (64 << 20) + CYCLES * 16384
