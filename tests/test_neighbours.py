"""While one sandbox takes all it can get, another notices nothing."""

from __future__ import annotations

import pytest

import corral
from conftest import Make
from support import Server, until

GREEDY = corral.Limits(memory_mib=256, cpus=1.0, pids=64, disk_mib=128, open_files=1024)
ROUNDS = 15

OPEN = """
import os
try:
    while True: os.open("/", 0)
except OSError: print("exhausted", flush=True)
while True: os.stat("/")
"""
DEEP = """
import os
for n in range(10000):
    os.mkdir("d"); os.chdir("d")
print("exhausted", flush=True)
while True: os.listdir(".")
"""
# It is the one to be killed, and the shell around it has no need of another process to make room.
FILL = "echo 1000 > /proc/self/oom_score_adj; exec cat /dev/zero > /dev/shm/fill"
FORK = """
import os
while True:
    try: os.fork()
    except OSError: print("exhausted", flush=True)
"""
HOGS = {
    "memory": "while :; do python3 -c 'x = []\nwhile True: x.append(bytearray(1 << 20))'; echo exhausted; done",
    "processes": ["python3", "-c", FORK],
    "disk": "while :; do cat /dev/zero > /fill; echo exhausted; rm /fill; done",
    "open files": ["python3", "-c", OPEN],
    "a deep tree": ["python3", "-c", DEEP],
    "output": "echo exhausted; exec yes exhausted",
    "shared memory": 'while :; do sh -c "$FILL"; echo exhausted; : > /dev/shm/fill; done',
}


def is_fine(box: corral.Sandbox, number: int) -> None:
    """Commands and files of a sandbox give the right answers."""
    text = f"number {number}\n" * 100
    assert box.exec(["echo", str(number)], timeout=120).stdout == f"{number}\n"
    box.exec(["sh", "-c", f"echo {number} > /inside; sync /inside"], timeout=120, check=True)
    assert box.files.read("/inside") == f"{number}\n"
    box.files.write("/outside", text)
    assert box.exec(["cat", "/outside"], timeout=120).stdout == text


@pytest.mark.parametrize("what", HOGS)
def test_a_neighbour_notices_nothing(server: Server, make: Make, debian: str, what: str) -> None:
    greedy, box = make(debian, limits=GREEDY), make()
    is_fine(box, -1)
    daemon, keepers = server.pid, server.keepers()
    hog = greedy.start(HOGS[what], env={"FILL": FILL})

    def exhausted() -> bool:
        said = (hog.output() + hog.output("stderr")).decode(errors="replace")
        return "exhausted" in said

    until(exhausted, 120, f"{what} is used up")
    for number in range(ROUNDS):
        is_fine(box, number)
    assert hog.refresh().running, "it was at it all the time"
    assert server.process is not None
    assert server.process.poll() is None
    assert (server.pid, server.keepers()) == (daemon, keepers)
