"""A disk of an arm's own, so that what is written to it is that arm's."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import host
from process import Failed, run

SECTOR = 512
GIB = 1 << 30
SIZE = 48 * GIB
# What is left of the machine's own disk at any time.
RESERVE = 8 * GIB
# Less would not take what an arm writes.
LEAST = 16 * GIB


class Disk:
    """A file system on a loop device on a sparse file, mounted at `DIRECTORY/at`."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.at = directory, directory / "at"
        self.device = ""

    def __enter__(self) -> Disk:
        if self.directory.exists():
            # Of a run that was killed.
            host.release(self.directory, None)
            shutil.rmtree(self.directory)
        self.at.mkdir(parents=True)
        size = min(SIZE, shutil.disk_usage(self.directory).free - RESERVE)
        if size < LEAST:
            raise Failed(f"too little room for the burst: {(LEAST + RESERVE) >> 30} GiB must be free")
        file = self.directory / "disk"
        with open(file, "wb") as made:
            made.truncate(size)
        # Nothing that the kernel would write later, between what is counted.
        quiet = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
        run(["mkfs.ext4", "-q", "-m", "0", "-i", "65536", "-E", quiet, file], 120)
        device = run(["losetup", "--find", "--show", "--direct-io=on", file], 30).strip()
        try:
            run(["mount", device, self.at], 30)
        finally:
            # It goes with the mount.
            run(["losetup", "--detach", device], 30)
        self.device = Path(device).name
        return self

    def written(self) -> int:
        """Bytes written so far, with what waited in memory."""
        run(["sync", "--file-system", self.at], 300)
        return int(Path("/sys/block", self.device, "stat").read_text().split()[6]) * SECTOR

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as all_of_it:
            all_of_it.callback(shutil.rmtree, self.directory, ignore_errors=True)
            all_of_it.callback(run, ["umount", self.at], 300)


def drop_caches() -> None:
    """Forgets all that was read of any disk."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
