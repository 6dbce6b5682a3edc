"""What a program inside can see and do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import corral
from conftest import Make
from support import Server, python_in

NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")


def status_of(box: corral.Sandbox, **options: str) -> dict[str, str]:
    lines = box.exec(["cat", "/proc/self/status"], **options).stdout.splitlines()  # type: ignore[arg-type]
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


MANY_TERMINALS = """
import os, pty, threading
names, start = [], threading.Barrier(16)
def take():
    start.wait()
    master, slave = pty.openpty()
    names.append(os.ttyname(slave))
    os.write(master, b"x\\n")
    assert os.read(slave, 9) == b"x\\n"
threads = [threading.Thread(target=take) for _ in range(16)]
for t in threads: t.start()
for t in threads: t.join()
mounts = [line for line in open("/proc/self/mountinfo") if " - devpts " in line]
print(len(mounts), sorted(names) == sorted(f"/dev/pts/{n}" for n in range(16)))
"""


def test_terminals_are_its_own_and_there_when_looked_for(make: Make, debian: str) -> None:
    """Both start to use theirs at the same moment, sixteen threads each."""
    wide = corral.Limits(memory_mib=256, cpus=1.0, pids=64, disk_mib=64)
    boxes = [make(debian, limits=wide) for _ in range(2)]
    commands = [box.start(["python3", "-c", MANY_TERMINALS], timeout=60) for box in boxes]
    for command in commands:
        command.wait()
        assert command.output() == b"1 True\n"
    third = make()
    assert third.exec("ls /dev/pts; ls -l /dev/ptmx; ls /dev/pts").stdout.splitlines()[0::2] == ["ptmx", "ptmx"]
    assert third.exec("mkdir /dev/pts/x; rmdir /dev/pts; umount /dev/pts; mount -t devpts d /dev/pts").exit_code != 0


def test_users_are_mapped_to_a_range_of_their_own(make: Make) -> None:
    starts = set()
    for sandbox in (make(), make()):
        [line] = sandbox.exec(["cat", "/proc/self/uid_map"]).stdout.splitlines()
        inside, outside, count = map(int, line.split())
        assert (inside, count) == (0, 65536)
        assert outside >= 65536
        starts.add(outside)
    assert len(starts) == 2


def test_capabilities_and_filters(box: corral.Sandbox) -> None:
    root, agent = status_of(box), status_of(box, user="agent")
    docker = 0x00000000A80425FB
    assert int(root["CapBnd"], 16) & ~docker == 0
    assert int(root["CapEff"], 16) & ~docker == 0
    assert int(agent["CapEff"], 16) == 0
    for status in (root, agent):
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
        assert int(status["CapInh"], 16) == 0


def test_set_user_id_programs_gain_nothing_unless_allowed(make: Make, debian: str) -> None:
    for allowed, uid in ((False, "1000"), (True, "0")):
        sandbox = make(debian, allow_setuid=allowed)
        sandbox.exec("cp /usr/bin/id /usr/bin/suid; chmod 4755 /usr/bin/suid", check=True)
        assert sandbox.exec(["suid", "-u"], user="1000").stdout.strip() == uid
        status = status_of(sandbox)
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("0" if allowed else "1", "2")


def test_namespaces_are_its_own(make: Make) -> None:
    one, other = make(), make()
    for name in NAMESPACES:
        ids = {box.exec(["readlink", f"/proc/self/ns/{name}"]).stdout.strip() for box in (one, other)}
        assert len(ids) == 2, name
        assert os.readlink(f"/proc/self/ns/{name}") not in ids, name


def test_only_its_own_processes(server: Server, box: corral.Sandbox) -> None:
    seen = [p for p in box.exec("ls /proc").stdout.split() if p.isdigit()]
    assert len(seen) <= 6
    assert box.exec(f"kill -0 {server.pid}").exit_code != 0
    first = box.exec("tr '\\0' ' ' < /proc/1/cmdline; cat /proc/1/environ | wc -c").stdout
    assert str(server.data) not in first


def test_no_mount_of_the_host_is_seen(server: Server, box: corral.Sandbox) -> None:
    text = box.exec(["cat", "/proc/self/mountinfo"]).stdout
    for path in (str(server.data), "/var/lib", "/work", "/root/", "/home/", "/opt/"):
        assert f" {path}" not in text, path
    types = {line.split(" - ")[1].split()[0] for line in text.splitlines()}
    assert types <= {"overlay", "proc", "sysfs", "tmpfs", "autofs", "devpts", "mqueue", "cgroup", "cgroup2"}
    assert str(server.data) not in box.exec("cat /proc/self/mounts /proc/self/cgroup").stdout


def test_nothing_of_the_platform_is_inside(box: corral.Sandbox) -> None:
    held = box.exec("ls -l /proc/self/fd /proc/1/fd 2>&1; ls -la / /run /tmp 2>&1; env").stdout
    assert "corral" not in held.lower()
    assert "socket" not in held


@pytest.mark.parametrize(
    "path",
    ["/proc/kcore", "/proc/keys", "/proc/sysrq-trigger", "/proc/timer_list", "/proc/sched_debug", "/sys/firmware"],
)
def test_masked(box: corral.Sandbox, path: str) -> None:
    read = box.exec(f"head -c 10 {path} 2>/dev/null; ls {path}/* 2>/dev/null")
    assert read.stdout.replace(path, "").strip() == "", read


def test_the_kernels_settings_are_out_of_reach(box: corral.Sandbox) -> None:
    for file in ("kernel/core_pattern", "vm/drop_caches", "kernel/hostname", "net/ipv4/ip_forward"):
        before = Path("/proc/sys", file).read_text() if file != "vm/drop_caches" else ""
        box.exec(f"echo '|/tmp/x' > /proc/sys/{file}")
        assert (Path("/proc/sys", file).read_text() if before else "") == before
    assert box.exec("echo 1 > /sys/kernel/mm/ksm/run").exit_code != 0
    assert box.exec("echo c > /proc/sysrq-trigger").exit_code != 0


FORBIDDEN = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, number, *args):
    ctypes.set_errno(0)
    code = libc.syscall(number, *args)
    print(name, "allowed" if code >= 0 else os.strerror(ctypes.get_errno()), flush=True)
    if code > 0 and name in {"clone_newuser"}: os._exit(0)
call("mount", 165, b"none", b"/mnt", b"tmpfs", 0, 0)
call("umount2", 166, b"/proc", 2)
call("unshare_user", 272, 0x10000000)
call("unshare_mnt", 272, 0x00020000)
call("keyctl", 250, 0, 0, 0, 0, 0)
call("add_key", 248, b"user", b"x", b"y", 1, -3)
call("bpf", 321, 0, 0, 0)
call("perf_event_open", 298, 0, 0, -1, -1, 0)
call("init_module", 175, 0, 0, b"")
call("kexec_load", 246, 0, 0, 0, 0)
call("reboot", 169, 0xfee1dead, 672274793, 0, 0)
call("swapon", 167, b"/x", 0)
call("settimeofday", 164, 0, 0)
call("userfaultfd", 323, 0)
call("io_uring_setup", 425, 1, ctypes.create_string_buffer(256))
call("open_by_handle_at", 304, -1, 0, 0)
call("pivot_root", 155, b"/", b"/")
call("mknod_block", 133, b"/tmp/blk", 0o60600, 0x800)
call("fsopen", 430, b"tmpfs", 0)
call("move_mount", 429, -1, b"/", -1, b"/", 0)
call("quotactl", 179, 0, 0, 0, 0)
call("acct", 163, 0)
"""


def test_system_calls_that_reach_out_are_refused(debian_box: corral.Sandbox) -> None:
    result = python_in(debian_box, FORBIDDEN)
    lines = [line.split(" ", 1) for line in result.stdout.splitlines()]
    assert len(lines) == FORBIDDEN.count("\ncall("), result
    # A pointer to nothing may be looked at before the right: what counts is that nothing was done.
    assert not [name for name, what in lines if what == "allowed" and name != "settimeofday"], lines


def test_devices(box: corral.Sandbox) -> None:
    listed = set(box.exec("ls /dev").stdout.split())
    assert {"null", "zero", "full", "random", "urandom", "tty", "pts", "shm", "ptmx"} <= listed
    assert not listed & {"kmsg", "mem", "kvm", "fuse", "vda", "sda", "loop0", "loop-control", "mapper", "net"}
    assert box.exec("mknod /tmp/disk b 254 0; head -c 1 /tmp/disk").exit_code != 0


LOOPBACK = """
import socket
listener = socket.create_server(("127.0.0.1", 80))
client = socket.create_connection(("127.0.0.1", 80), 10)
listener.accept()[0].sendall(b"hello")
print(client.recv(5).decode(), [name for _, name in socket.if_nameindex()])
try:
    socket.create_connection(("192.0.2.1", 80), 5)
except OSError as e:
    print(type(e).__name__)
"""


def test_loopback_is_up_and_nothing_else(debian_box: corral.Sandbox) -> None:
    result = python_in(debian_box, LOOPBACK)
    assert result.stdout.splitlines()[0] == "hello ['lo']", result
    assert "OSError" in result.stdout


def test_names(make: Make) -> None:
    sandbox = make(hostname="agent-7")
    assert sandbox.exec("hostname; uname -n").stdout.split() == ["agent-7", "agent-7"]
    hosts = sandbox.exec("cat /etc/hosts").stdout
    assert "localhost" in hosts
    assert "agent-7" in hosts
    assert sandbox.exec("hostname evil").exit_code != 0 or os.uname().nodename != "evil"


def test_sandboxes_do_not_reach_each_other(make: Make) -> None:
    one, other = make(), make()
    one.exec("echo secret > /tmp/s; echo secret > /dev/shm/s", check=True)
    assert other.exec("cat /tmp/s /dev/shm/s 2>/dev/null").stdout == ""
    assert other.exec("ls /proc/sysvipc/shm && wc -l < /proc/sysvipc/shm").stdout.split()[-1] == "1"


def test_paths_of_the_host_are_not_told(server: Server, box: corral.Sandbox) -> None:
    told = box.exec(
        "cat /sys/block/*/loop/backing_file /sys/devices/virtual/block/*/loop/backing_file 2>/dev/null"
    ).stdout
    assert told == ""
    assert box.exec("ls /sys/fs/btrfs").stdout == ""
