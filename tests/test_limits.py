"""Limits, by programs that try to break them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import corral
from conftest import Make
from support import Server, first_process, host_pids, python_in, status_of, until


def limits(**more: float) -> corral.Limits:
    return corral.Limits(**({"memory_mib": 128, "cpus": 1.0, "pids": 64, "disk_mib": 64} | more))  # type: ignore[arg-type]


def test_memory_beyond_the_limit_ends_the_command_and_says_so(make: Make, debian: str) -> None:
    sandbox = make(debian, limits=limits(memory_mib=96))
    result = python_in(sandbox, "x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert (result.outcome.name, result.outcome.oom, result.exit_code) == ("SIGKILL", True, 137)
    assert sandbox.exec("echo alive").stdout == "alive\n", "the sandbox lives on"
    stats = sandbox.stats()
    assert stats.oom_kills >= 1
    assert stats.memory_peak_bytes <= 97 << 20


def test_each_that_memory_takes_is_told_so(make: Make, debian: str) -> None:
    sandbox = make(debian, limits=limits(memory_mib=128))
    fill = ["python3", "-c", "x = []\nwhile True: x.append(bytearray(1 << 20))"]
    commands = [sandbox.start(fill) for _ in range(5)]
    ends = [command.wait().end for command in commands]
    assert all(end is not None and end.oom for end in ends), ends


def test_a_kill_is_not_taken_for_want_of_memory(make: Make, debian: str) -> None:
    """One that lost a child to the limit is not blamed for it, nor are commands that come after."""
    sandbox = make(debian, limits=limits(memory_mib=96))
    fill = "python3 -c 'x = []\nwhile True: x.append(bytearray(1 << 20))'"
    assert sandbox.exec(f"{fill}; echo went on").stdout == "went on\n"
    assert sandbox.stats().oom_kills >= 1
    sleeper = sandbox.start("exec sleep 100")
    sleeper.signal("SIGKILL")
    end = sleeper.wait().end
    assert end is not None
    assert (end.name, end.oom) == ("SIGKILL", False)


def test_memory_that_takes_the_first_process_ends_the_sandbox(server: Server, make: Make) -> None:
    sandbox, neighbour = make(limits=limits(memory_mib=48)), make()
    # The kernel kills the largest: only the host can make that the first process. Files in memory are nobody's size.
    Path(f"/proc/{first_process(server.node_id, sandbox.id)}/oom_score_adj").write_text("1000")
    hog = sandbox.start("exec cat /dev/zero > /dev/shm/fill")
    until(lambda: sandbox.refresh().state == corral.State.ENDED, 60)
    assert sandbox.status.end is not None
    assert sandbox.status.end.reason == corral.EndReason.OOM
    told = hog.refresh().end
    assert told is not None
    assert told.type == corral.OutcomeType.SANDBOX_ENDED
    assert neighbour.exec("echo alive").stdout == "alive\n"


def test_files_in_memory_count(make: Make) -> None:
    sandbox = make(limits=limits(memory_mib=48))
    result = sandbox.exec("dd if=/dev/zero of=/dev/shm/x bs=1M count=200", timeout=120)
    assert not result.ok
    assert sandbox.stats().memory_bytes <= 49 << 20
    assert sandbox.exec("rm -f /dev/shm/x; echo alive").stdout.endswith("alive\n")


def test_writing_many_files_is_no_end_by_memory(make: Make) -> None:
    sandbox = make(limits=limits(memory_mib=48, disk_mib=256))
    result = sandbox.exec("dd if=/dev/zero of=/x bs=1M count=180 2>&1; sync", timeout=150)
    assert result.ok, "the page cache is given back under pressure"
    assert sandbox.stats().oom_kills == 0


BURN = """
import os, time
end = time.monotonic() + 4
while time.monotonic() < end: pass
t = os.times()
print(t.user + t.system)
"""


def test_cpu_is_a_quota(make: Make, debian: str) -> None:
    sandbox = make(debian, limits=limits(cpus=0.25))
    result = python_in(sandbox, BURN, timeout=120)
    # A quarter of four seconds, and a period at either end.
    assert float(result.stdout) < 1.5


def test_two_that_burn_share_one_quota(make: Make) -> None:
    sandbox = make(limits=limits(cpus=0.5))
    before = sandbox.stats().cpu_ms
    result = sandbox.exec("for n in 1 2 3 4; do timeout 3 sh -c 'while :; do :; done' & done; wait", timeout=120)
    assert result.usage.wall_ms >= 2900
    used = sandbox.stats().cpu_ms - before
    assert used <= result.usage.wall_ms * 0.5 + 400


CORES = os.cpu_count() or 1
BURN_EVERYWHERE = f"for n in $(seq {CORES}); do while :; do :; done & done; wait"


def test_weights_share_out_what_both_want(make: Make) -> None:
    light, heavy = (make(limits=limits(cpus=CORES, cpu_weight=weight)) for weight in (100, 400))
    for sandbox in (light, heavy):
        sandbox.start(BURN_EVERYWHERE)
    until(lambda: min(light.stats().cpu_ms, heavy.stats().cpu_ms) > 100, 60, "both burn")
    before = light.stats().cpu_ms, heavy.stats().cpu_ms
    until(lambda: heavy.stats().cpu_ms - before[1] > 4000, 120, "the heavy one has burnt on")
    assert heavy.stats().cpu_ms - before[1] > 1.8 * (light.stats().cpu_ms - before[0])


@pytest.mark.skipif(CORES == 1, reason="there is no other core to move to")
def test_two_that_burn_on_one_core_are_parted(server: Server, make: Make) -> None:
    def cores(sandbox: corral.Sandbox) -> set[str]:
        return {status_of(pid)["Cpus_allowed_list"] for pid in host_pids(server.node_id, sandbox.id)}

    made = [make() for _ in range(CORES + 1)]
    place = {sandbox.id: cores(sandbox) for sandbox in made}
    one, two = next((a, b) for a in made for b in made if a.id < b.id and place[a.id] == place[b.id])
    for sandbox in made:
        if sandbox.id not in {one.id, two.id}:
            sandbox.delete()
    for sandbox in (one, two):
        sandbox.start("while :; do :; done")
    until(lambda: cores(one) != cores(two), 120, "one of them is moved")
    until(lambda: len(cores(one)) == len(cores(two)) == 1, 30, "with all its processes")


def test_processes(make: Make) -> None:
    sandbox = make(limits=limits(pids=32))
    bomb = sandbox.start("bomb() { bomb | bomb & }; bomb", timeout=20)
    until(lambda: sandbox.stats().pids >= 20 or not bomb.refresh().running, 30)
    assert sandbox.stats().pids <= 32
    bomb.kill()
    until(lambda: sandbox.stats().pids <= 2, 60, "the kill reaches every process of the bomb")
    assert sandbox.exec("echo alive").stdout == "alive\n"


def test_no_room_for_another_process_is_said_so(make: Make) -> None:
    sandbox = make(limits=limits(pids=8))
    hogs = sandbox.start("for n in 1 2 3 4 5 6; do sleep 1000 & done; exec sleep 1000")
    until(lambda: sandbox.stats().pids == 8, 30, "its first process, and seven")
    with pytest.raises(corral.LimitExceeded):
        sandbox.exec("true")
    hogs.kill()
    until(lambda: sandbox.stats().pids <= 2, 30)
    assert sandbox.exec("true").ok


OPEN_ALL = """
import os, resource
print(resource.getrlimit(resource.RLIMIT_NOFILE))
try:
    while True: os.open("/", 0)
except OSError as e: print(e.errno)
"""
FILL = """
f = open("/big", "wb", 0)
try:
    while True: f.write(b"x" * (1 << 20))
except OSError as e: print(e.errno, f.tell() >> 20)
"""


def test_open_files(make: Make, debian: str) -> None:
    sandbox = make(debian, limits=limits(open_files=64))
    assert python_in(sandbox, OPEN_ALL).stdout == "(64, 64)\n24\n"
    raised = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (65, 65))"
    assert not python_in(sandbox, raised).ok


def test_disk(make: Make, debian: str) -> None:
    sandbox = make(debian, limits=limits(disk_mib=32))
    errno, written = map(int, python_in(sandbox, FILL, timeout=120).stdout.split())
    assert errno in {122, 28}, "EDQUOT or ENOSPC"
    assert 16 <= written <= 32
    with pytest.raises(corral.DiskFull):
        sandbox.files.write("/another", b"y" * (8 << 20))
    assert sandbox.exec("rm /big; echo again > /small; cat /small").stdout == "again\n"
    until(lambda: sandbox.stats().disk_bytes < 4 << 20, 60, "what is removed is given back")


def test_many_small_files_are_bounded_too(make: Make) -> None:
    sandbox = make(limits=limits(disk_mib=16))
    result = sandbox.exec("n=0; while [ $n -lt 60000 ]; do : > /f$n || exit 9; n=$((n+1)); done", timeout=170)
    assert result.exit_code in {9, 1, 2}
    assert sandbox.stats().disk_bytes <= 17 << 20


EXHAUST = """
import ctypes, json, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
held = {}
def count(name, make):
    n = 0
    while n < 200000:
        if make() < 0: break
        n += 1
    held[name] = n
count("inotify", lambda: libc.inotify_init())
class SigVal(ctypes.Union):
    _fields_ = [("i", ctypes.c_int), ("p", ctypes.c_void_p)]
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
count("sigpending", lambda: libc.sigqueue(os.getpid(), 40, SigVal(i=1)))
librt = ctypes.CDLL("librt.so.1", use_errno=True)
number = iter(range(10**9))
count("msgqueue", lambda: librt.mq_open(b"/q%d" % next(number), os.O_CREAT | os.O_RDWR, 0o600, None))
print(json.dumps(held), flush=True)
signal.pause()
"""


def test_what_one_exhausts_another_still_has(make: Make, debian: str) -> None:
    wide = limits(open_files=2048, memory_mib=256)
    first, second = make(debian, limits=wide), make(debian, limits=wide)
    alone = first.start(["python3", "-c", EXHAUST])
    mine = json.loads(until(lambda: alone.output().strip(), 60, "the first has taken all it can"))
    beside = second.start(["python3", "-c", EXHAUST])
    other = json.loads(until(lambda: beside.output().strip(), 60, "the second too"))
    for name, had in mine.items():
        assert had > 0, name
        assert other[name] >= had * 0.8, f"{name}: {mine} and then {other}"


def test_programs_see_the_limits(make: Make, debian: str) -> None:
    sandbox = make(debian, limits=limits(cpus=1.0, memory_mib=192))
    assert sandbox.exec("nproc").stdout == "1\n"
    assert python_in(sandbox, "import os; print(len(os.sched_getaffinity(0)))").stdout == "1\n"
    assert python_in(sandbox, "import os; print(os.cpu_count())").stdout == "1\n"
    total = int(sandbox.exec("grep MemTotal /proc/meminfo").stdout.split()[1])
    assert total == 192 << 10


@pytest.mark.parametrize(
    "wide",
    [
        {"memory_mib": 1 << 24},
        {"cpus": 4096.0},
        {"disk_mib": 1 << 24},
        {"pids": 0},
        {"cpu_weight": 0},
        {"memory_mib": 1},
        {"open_files": 1 << 21},
        {"cpus": -1},
    ],
)
def test_what_the_node_cannot_give_is_refused(make: Make, wide: dict[str, float]) -> None:
    with pytest.raises(corral.CorralError) as caught:
        make(limits=wide)
    assert not caught.value.retryable, "it will never fit"
    assert caught.value.status in {400, 409, 422}


SOCKETS = """
import socket
kept, got = [], 0
sink = b"x" * 60000
try:
    while got < 400 << 20:
        a = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); a.bind(("127.0.0.1", 0)); a.setblocking(False)
        b = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); b.setblocking(False)
        a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        kept += [a, b]
        for _ in range(3):
            b.sendto(sink, a.getsockname()); got += len(sink)
except OSError as error: print(error.errno)
held = 0
for a in kept[::2]:
    try:
        while True: held += len(a.recv(65536))
    except OSError: pass
print(held >> 20)
"""


def test_what_sockets_hold_counts(make: Make, debian: str) -> None:
    sandbox = make(debian, limits=limits(memory_mib=96, open_files=8192))
    result = python_in(sandbox, SOCKETS, timeout=120)
    held = int(result.stdout.split()[-1]) if result.ok else 0
    assert held <= 96, "no more than its memory, or it was killed for it"
    assert sandbox.exec("echo alive").stdout == "alive\n"


POOLS = """
import ctypes, os, pty, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
context = ctypes.c_ulong(0)
print(libc.syscall(206, 128, ctypes.byref(context)), ctypes.get_errno())
for family in (17, 44, 38, 40):
    try: socket.socket(family, socket.SOCK_RAW)
    except OSError as error: print(family, error.errno)
taken = 0
try:
    while taken < 1000: pty.openpty(); taken += 1
except OSError: pass
print(taken)
s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0xffff))
try: s.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HL", 1, ctypes.addressof(code)))
except OSError as error: print(error.errno)
"""


def test_pools_of_the_host_are_out_of_reach_or_shared_out(make: Make, debian: str) -> None:
    """Native asynchronous I/O, packet rings, programs for the kernel; terminals are bounded."""
    sandbox = make(debian, limits=limits(open_files=4096))
    said = python_in(sandbox, POOLS).stdout.splitlines()
    assert said == ["-1 38", "17 1", "44 1", "38 1", "40 1", "128", "1"]
