#!/usr/bin/env python3
"""Hashes every file of the burst's images, lazily, while the server of lazy reads is killed every second.

The hashes must be those of a node that fetched the layers whole. Takes minutes and some 30 GB of disk; needs root.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import corral

from burst import LIMITS, Burst
from disk import Disk, drop_caches
from node import Node
from process import Failed, mentioning, say
from tasks import IMAGES

REPOSITORY = Path(__file__).resolve().parent.parent
AT_ONCE = 4
# But for what each sandbox has of its own.
HASH = "find / -xdev -type f ! -path '/etc/host*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
HASH_S = 900


def hashes(burst: Burst, published: Path, *options: str, killed: bool = False) -> dict[str, str]:
    """The hash of each image's tree on a node of its own."""
    with Disk(burst.directory / "soak") as disk:
        node = burst.node(published, disk, f"--store=file://{published / 'store'}", *options)
        try:
            node.start()
            drop_caches()
            with node.client() as client, ThreadPoolExecutor(AT_ONCE) as pool:
                with killing(node) if killed else contextlib.nullcontext():
                    return dict(pool.map(lambda image: (image.name, hash_of(client, image.name)), IMAGES))
        finally:
            node.remove()


def hash_of(client: corral.Client, image: str) -> str:
    """The hash of all files of an image, in a sandbox."""
    with client.sandboxes.create(image, limits=LIMITS) as box:
        result = box.exec(HASH, timeout=HASH_S)
        if not result.ok or result.stderr:
            raise Failed(f"{image}: exit code {result.exit_code}: {result.stderr.strip()[-500:]}")
        return result.stdout.split()[0]


@contextlib.contextmanager
def killing(node: Node) -> Iterator[None]:
    """Kills the server of lazy reads every second."""
    done, count = threading.Event(), 0

    def kill() -> None:
        nonlocal count
        while not done.wait(1):
            for pid in servers(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    count += 1

    killer = threading.Thread(target=kill)
    killer.start()
    begun = time.monotonic()
    try:
        yield
    finally:
        done.set()
        killer.join()
        say(f"  {count} servers killed in {time.monotonic() - begun:.0f} s")


def servers(node: Node) -> list[int]:
    """The servers of a node: children of the holder that names its directory."""
    return [int(pid) for holder in mentioning(f"{node.directory}/layers") for pid in _children(holder)]


def _children(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return []


def main() -> int:
    """The program."""
    libexec = Path(os.environ.get("CORRAL_LIBEXEC", REPOSITORY / "target/libexec")).resolve()
    burst = Burst(libexec, Path("corral-load"), REPOSITORY / "target/bench/soak", 1, len(IMAGES))
    try:
        published = burst.published()
        say("hashing what was fetched whole")
        whole = hashes(burst, published, "--whole-layers")
        say("hashing lazily, a server killed every second")
        lazy = hashes(burst, published, killed=True)
    except (Failed, corral.CorralError) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    wrong = [name for name in whole if lazy.get(name) != whole[name]]
    print(f"{len(whole)} images hashed, {len(wrong)} wrong{': ' if wrong else ''}{', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
