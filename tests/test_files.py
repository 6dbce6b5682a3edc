"""Files: exact, atomic, bounded, and never outside the sandbox."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import corral
from conftest import Make
from support import Server, python_in, rss_bytes, tar_of, until


def test_read_write_and_ranges(box: corral.Sandbox) -> None:
    data = bytes(range(256)) * 1000
    status = box.files.write("/tmp/f", data, mode=0o640)
    assert (status.size_bytes, status.mode & 0o777, status.uid) == (len(data), 0o640, 0)
    assert box.files.read_bytes("/tmp/f") == data
    assert box.files.read_bytes("/tmp/f", offset=1000, length=300) == data[1000:1300]
    assert box.files.read_bytes("/tmp/f", offset=len(data) - 5) == data[-5:]
    assert box.files.read_bytes("/tmp/f", offset=10, length=10**9) == data[10:]
    with pytest.raises(corral.InvalidRequest) as caught:
        box.files.read_bytes("/tmp/f", offset=len(data) + 1)
    assert caught.value.kind == "range_not_satisfiable"
    assert box.exec(["sha256sum", "/tmp/f"]).stdout.split()[0] == hashlib.sha256(data).hexdigest()
    box.files.write("/tmp/empty", b"")
    assert box.files.read_bytes("/tmp/empty") == b""
    box.files.write("/tmp/n a m e %2e ü\n", "odd")
    assert box.files.read("/tmp/n a m e %2e ü\n") == "odd"


def test_the_end_of_a_file(server: Server, box: corral.Sandbox) -> None:
    box.files.write("/tmp/f", b"0123456789")
    box.files.write("/tmp/empty", b"")
    with server.http() as http:

        def end(count: int, file: str = "/tmp/f") -> httpx.Response:
            path = f"/v1/sandboxes/{box.id}/files"
            return http.get(path, params={"path": file}, headers={"range": f"bytes=-{count}"})

        answer = end(3)
        assert (answer.status_code, answer.content) == (206, b"789")
        assert answer.headers["content-range"] == "bytes 7-9/10"
        assert (end(100).status_code, end(100).content) == (206, b"0123456789")
        for nothing in (end(5, "/tmp/empty"), end(0)):
            assert (nothing.status_code, nothing.json()["kind"]) == (416, "range_not_satisfiable")
        assert end(3, "/tmp/none").status_code == 404
        at_end = http.get(f"/v1/sandboxes/{box.id}/files", params={"path": "/tmp/f"}, headers={"range": "bytes=10-"})
        assert (at_end.status_code, at_end.headers["content-range"]) == (416, "bytes */10")
        assert at_end.headers["x-request-id"] == at_end.json()["request_id"]
    # The client tells the end from what lies beyond it.
    assert box.files.read_bytes("/tmp/f", offset=10) == b""
    assert list(box.files.open_read("/tmp/f", offset=10)) == []
    with pytest.raises(corral.InvalidRequest):
        list(box.files.open_read("/tmp/f", offset=11))


def test_files_that_the_kernel_makes_up(box: corral.Sandbox) -> None:
    status = box.files.read("/proc/1/status")
    assert status.startswith("Name:")
    assert status.endswith("\n")
    assert "[" in box.files.read("/sys/kernel/mm/transparent_hugepage/enabled")
    version = box.files.read_bytes("/proc/version")
    assert box.files.read_bytes("/proc/version", offset=6, length=7) == version[6:13] == b"version"


def test_what_a_sandbox_arranges_is_not_the_platforms_failure(box: corral.Sandbox) -> None:
    """A failed run must not be made to look like one of the infrastructure."""
    box.exec("ln -s /proc/1/mem /tmp/result", check=True)
    with pytest.raises(corral.CorralError) as read:
        box.files.read_bytes("/tmp/result")
    with pytest.raises(corral.CorralError) as moved:
        box.files.move("/dev/null", "/tmp/null")
    for caught in (read.value, moved.value):
        assert not caught.infra_failed, caught
        assert not caught.retryable, caught


def test_bytes_that_are_no_text_are_told_or_refused(server: Server, box: corral.Sandbox) -> None:
    box.exec("mkdir /tmp/d && ln -s $(printf '/caf\\351') $(printf '/tmp/d/l\\351')", check=True)
    [entry] = box.files.list("/tmp/d")
    assert base64.b64decode(entry.path_base64 or "") == b"l\xe9"
    assert base64.b64decode(entry.link_target_base64 or "") == b"/caf\xe9"
    with server.http() as http:
        refused = http.get(f"/v1/sandboxes/{box.id}/files/stat?path=/tmp/d/l%E9")
        assert (refused.status_code, refused.json()["kind"]) == (400, "invalid_request")
        assert "UTF-8" in refused.json()["message"]


def test_a_file_has_a_name(box: corral.Sandbox) -> None:
    for file in ("/tmp/new/", "/tmp/", "/"):
        with pytest.raises(corral.InvalidRequest, match="ends in /"):
            box.files.write(file, "x", parents=True)
    assert [entry.path for entry in box.files.list("/tmp")] == []


def test_a_user_has_that_users_rights(box: corral.Sandbox) -> None:
    box.files.write("/root/secret", "s", mode=0o600)
    for attempt in (
        lambda: box.files.read("/root/secret", user="agent"),
        lambda: box.files.write("/etc/passwd", "x", user="agent"),
        lambda: box.files.remove("/root/secret", user="agent"),
    ):
        with pytest.raises(corral.PermissionDenied):
            attempt()
    assert box.files.write("/home/agent/mine", "x", user="agent").uid == 1000


def test_what_is_not_there_or_is_something_else(box: corral.Sandbox) -> None:
    with pytest.raises(corral.NotFound):
        box.files.read("/nope")
    with pytest.raises(corral.NotFound):
        box.files.write("/no/such/dir/file", "x")
    box.files.write("/no/such/dir/file", "x", parents=True)
    with pytest.raises(corral.WrongFileType):
        box.files.read("/tmp")
    with pytest.raises(corral.WrongFileType):
        box.files.list("/etc/passwd")
    assert not box.files.exists("/nope")
    assert box.files.exists("/etc/passwd")


def test_directories_and_moves(box: corral.Sandbox) -> None:
    files = box.files
    files.mkdir("/w/a/b", parents=True, mode=0o700)
    files.mkdir("/w/a/b", parents=True)
    with pytest.raises(corral.Conflict):
        files.mkdir("/w/a")
    files.write("/w/a/one", "1")
    files.write("/w/two", "22")
    listed = files.list("/w", depth=3)
    assert [e.path for e in listed] == sorted(["a", "a/b", "a/one", "two"])
    assert {e.path: e.size_bytes for e in listed if e.file_type == "file"} == {"a/one": 1, "two": 2}
    part = files.list("/w", depth=3, limit=2)
    assert (len(part), part.truncated) == (2, True)
    with pytest.raises(corral.Conflict):
        files.move("/w/two", "/w/a/one")
    files.move("/w/two", "/w/a/one", overwrite=True)
    assert files.read("/w/a/one") == "22"
    with pytest.raises(corral.Conflict):
        files.remove("/w/a")
    files.remove("/w", recursive=True)
    assert not files.exists("/w")


def test_a_reader_sees_the_old_or_the_new(box: corral.Sandbox) -> None:
    sizes = (100_000, 300_000)
    box.files.write("/tmp/f", b"a" * sizes[0])
    stop = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not stop.is_set():
            seen.add(hashlib.sha256(box.files.read_bytes("/tmp/f")).digest())

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read) for _ in range(2)]
        for n in range(40):
            box.files.write("/tmp/f", (b"a", b"b")[n % 2] * sizes[n % 2])
        stop.set()
        for future in reading:
            future.result(30)
    whole = {hashlib.sha256((b"a", b"b")[n] * sizes[n]).digest() for n in (0, 1)}
    assert seen <= whole
    assert [e.path for e in box.files.list("/tmp")] == ["f"], "no temporary file is left"


def test_a_write_that_breaks_off_leaves_the_old(server: Server, box: corral.Sandbox) -> None:
    box.files.write("/tmp/f", "old")

    def pieces() -> Iterator[bytes]:
        yield b"new"
        raise ConnectionError("gone")

    with server.http() as http, pytest.raises((ConnectionError, httpx.TransportError)):
        http.put(f"/v1/sandboxes/{box.id}/files", params={"path": "/tmp/f"}, content=pieces())
    until(lambda: [e.path for e in box.files.list("/tmp")] == ["f"], 30)
    assert box.files.read("/tmp/f") == "old"


def test_links_stay_inside(box: corral.Sandbox, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("host")
    box.exec(
        f"ln -s {outside} /tmp/abs; ln -s ../../../../../../..{outside} /tmp/rel; ln -s / /tmp/top; "
        "ln -s /proc/1/root /tmp/proc; ln -s loop /tmp/loop; ln -s /etc/passwd /tmp/in",
        check=True,
    )
    for name in ("abs", "rel", f"top{outside}", f"proc{outside}", f"../../../..{outside}"):
        with pytest.raises((corral.NotFound, corral.PermissionDenied)):
            box.files.read(f"/tmp/{name}")
    with pytest.raises(corral.CorralError):
        box.files.read("/tmp/loop")
    assert "root" in box.files.read("/tmp/in")
    assert "root" in box.files.read("/tmp/top/etc/passwd")
    status = box.files.stat("/tmp/abs")
    assert (status.file_type, status.link_target) == ("symlink", str(outside))
    with pytest.raises(corral.CorralError):
        box.files.write("/tmp/abs", "gotcha")
    assert outside.read_text() == "host"
    assert box.files.read_bytes("/etc/../../../etc/passwd") == box.files.read_bytes("/etc/passwd")


def test_links_that_change_while_they_are_followed(box: corral.Sandbox, tmp_path: Path) -> None:
    host = tmp_path / "d"
    host.mkdir()
    (host / "f").write_text("host")
    box.exec(f"mkdir -p /a {tmp_path}; mkdir /real; echo inside > /real/f; ln -s {host} /link", check=True)
    racer = box.start("while :; do mv /real /a/d; mv /a/d /x; ln -sfn /link /a/d; rm /a/d; mv /x /real; done")
    for n in range(200):
        try:
            assert box.files.read("/a/d/f") == "inside\n"
        except corral.CorralError as error:
            assert not error.infra_failed, error
        try:
            box.files.write("/a/d/g", str(n))
        except corral.CorralError as error:
            assert not error.infra_failed, error
    racer.kill()
    assert os.listdir(host) == ["f"]
    assert (host / "f").read_text() == "host"


def test_what_would_hang_does_not(box: corral.Sandbox) -> None:
    box.exec("mkfifo /tmp/pipe; mkdir /tmp/d; mkfifo /tmp/d/pipe; echo x > /tmp/d/f", check=True)
    for name in ("/tmp/pipe", "/dev/zero", "/dev/tty", "/dev/null"):
        with pytest.raises(corral.CorralError) as caught:
            box.files.read(name)
        assert not caught.value.infra_failed, name
    with pytest.raises(corral.WrongFileType):
        box.files.write("/tmp/pipe", "not a file")
    packed = b"".join(box.files.download_tar("/tmp/d"))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert "f" in {os.path.normpath(n) for n in archive.getnames()}
    assert box.files.stat("/tmp/d/pipe").file_type == "fifo"
    for name in ("/proc/kmsg", "/proc/self/mem", "/proc/1/environ"):
        with pytest.raises(corral.CorralError):
            box.files.read(name)


def test_names_that_are_no_text(debian_box: corral.Sandbox) -> None:
    """They come out of an archive byte for byte, and a list says what it cannot spell."""
    made = python_in(
        debian_box, r"import os; os.makedirs(b'/tmp/n/d\xff'); open(b'/tmp/n/d\xff/\xfe', 'w').write('odd')"
    )
    assert made.ok, made.stderr
    listed = {entry.path: entry.path_base64 for entry in debian_box.files.list("/tmp/n", depth=2)}
    raw = {base64.b64decode(text) for text in listed.values() if text is not None}
    assert raw == {b"d\xff", b"d\xff/\xfe"}, listed
    debian_box.files.write("/tmp/n/plain", "x")
    assert next(e for e in debian_box.files.list("/tmp/n") if e.path == "plain").path_base64 is None
    packed = b"".join(debian_box.files.download_tar("/tmp/n"))
    with tarfile.open(fileobj=io.BytesIO(packed), errors="surrogateescape") as archive:
        names = {os.fsencode(name).rstrip(b"/") for name in archive.getnames()}
    assert {b"d\xff", b"d\xff/\xfe"} <= names, names
    debian_box.files.upload_tar("/tmp/again", packed)
    same = python_in(debian_box, r"print(open(b'/tmp/again/d\xff/\xfe').read())")
    assert same.stdout == "odd\n"


LEASE = """
import fcntl, signal, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
held = open("/tmp/leased", "w")
fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
time.sleep(60)
"""


def test_a_lease_is_not_waited_for_without_end(debian_box: corral.Sandbox) -> None:
    debian_box.files.write("/tmp/lease.py", LEASE)
    holder = debian_box.start(["python3", "/tmp/lease.py"], timeout=120)
    until(lambda: holder.output() == b"held\n", 30)
    before = debian_box.stats().cpu_ms
    with pytest.raises(corral.Conflict, match="lease"):
        debian_box.files.read("/tmp/leased")
    assert debian_box.stats().cpu_ms - before < 2000, "it waits, it does not spin"
    holder.kill()
    holder.wait()
    assert debian_box.files.read("/tmp/leased") == ""


def test_a_lease_on_the_list_of_users_is_told_and_passes(debian_box: corral.Sandbox) -> None:
    debian_box.exec("echo someone:x:1234:1234::/:/bin/sh >> /etc/passwd", check=True)
    debian_box.files.write("/tmp/lease.py", LEASE.replace('open("/tmp/leased", "w")', 'open("/etc/passwd", "a")'))
    holder = debian_box.start(["python3", "/tmp/lease.py"], timeout=120)
    until(lambda: holder.output() == b"held\n", 30)
    with pytest.raises(corral.Conflict, match="lease") as caught:
        debian_box.exec("true", user="someone")
    assert (caught.value.kind, caught.value.retryable) == ("file_busy", True)
    holder.kill()
    holder.wait()
    assert debian_box.exec("id -u", user="someone").stdout == "1234\n"


DEEP = """
import os
os.chdir("/tmp")
for n in range(10000):
    os.mkdir("d")
    os.chdir("d")
open("f", "w").write("deep")
"""


def test_ten_thousand_deep(debian_box: corral.Sandbox) -> None:
    assert python_in(debian_box, DEEP, timeout=120).ok
    assert len(debian_box.files.list("/tmp", depth=50)) == 50
    with pytest.raises(corral.CorralError) as caught:
        debian_box.files.read("/tmp/" + "d/" * 10000 + "f")
    assert not caught.value.infra_failed
    size = 0
    try:
        for chunk in debian_box.files.download_tar("/tmp"):
            size += len(chunk)
    except corral.CorralError as error:
        assert not error.infra_failed
    debian_box.files.remove("/tmp/d", recursive=True)
    assert not debian_box.files.exists("/tmp/d")


def test_directories_in_and_out(box: corral.Sandbox, tmp_path: Path) -> None:
    tree = tmp_path / "in"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "data").write_bytes(os.urandom(3 << 20))
    (tree / "run").write_text("#!/bin/sh\necho ran\n")
    (tree / "run").chmod(0o755)
    (tree / "link").symlink_to("sub/data")
    (tree / "nowhere").symlink_to("n" * 300)
    box.files.upload_dir(tree, "/work")
    assert box.files.stat("/work/nowhere").link_target == "n" * 300
    box.files.remove("/work/nowhere")
    assert box.exec(["/work/run"]).stdout == "ran\n"
    assert box.files.stat("/work/link").link_target == "sub/data"
    assert box.files.stat("/work/run").uid == 0
    assert not box.files.download_dir("/work", tmp_path / "out")
    assert (tmp_path / "out" / "sub" / "data").read_bytes() == (tree / "sub" / "data").read_bytes()
    box.files.upload_dir(tree, "/home/agent/w", user="agent")
    assert box.files.stat("/home/agent/w/run").uid == 1000


def test_hostile_archives(box: corral.Sandbox, tmp_path: Path) -> None:
    def member(kind: bytes, link: str = "", size: int = 0) -> tarfile.TarInfo:
        info = tarfile.TarInfo()
        info.type, info.linkname, info.size, info.mode = kind, link, size, 0o644
        return info

    inside = f"/tmp/in{tmp_path}"
    box.files.mkdir(inside, parents=True)
    attacks = [
        tar_of({f"../../../../../../..{tmp_path}/up": b"x"}),
        tar_of({f"{tmp_path}/abs": b"x"}),
        tar_of({"l": member(tarfile.SYMTYPE, str(tmp_path)), "l/through": b"x"}),
        tar_of({"h": member(tarfile.LNKTYPE, "/etc/shadow")}),
        tar_of({"h": member(tarfile.LNKTYPE, "../../../../etc/shadow")}),
        tar_of({"dev": member(tarfile.CHRTYPE)}),
        tar_of({"f": b"content"})[:700],
        b"no archive at all" * 100,
    ]
    for number, attack in enumerate(attacks):
        try:
            box.files.upload_tar(inside, attack)
        except corral.CorralError as error:
            assert not error.infra_failed, (number, error)
    assert not list(tmp_path.iterdir()), "nothing of it reaches the host"
    assert box.exec("ls -l /tmp/in/dev").exit_code != 0
    many = tar_of({f"{n:05}": b"" for n in range(20_000)})
    try:
        box.files.upload_tar("/tmp/in", many)
    except corral.CorralError as error:
        assert error.kind in {"disk_full", "limit_exceeded", "too_large"}
    assert box.exec("echo alive").ok


def test_a_download_of_a_directory_that_grows(box: corral.Sandbox) -> None:
    box.exec("mkdir /tmp/g; n=0; while [ $n -lt 300 ]; do echo x > /tmp/g/$n; n=$((n+1)); done", check=True)
    writer = box.start(
        "while :; do for f in /tmp/g/*; do echo longer >> $f; rm /tmp/g/1; echo x > /tmp/g/1; done; done", timeout=60
    )
    for _ in range(5):
        packed = b"".join(box.files.download_tar("/tmp/g"))
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            assert len(archive.getmembers()) >= 299
    writer.kill()


def test_a_quota_ends_an_upload(make: Make) -> None:
    sandbox = make(limits=corral.Limits(memory_mib=128, pids=64, disk_mib=16))
    for upload in (
        lambda: sandbox.files.write("/big", b"x" * (32 << 20)),
        lambda: sandbox.files.upload_tar("/tmp", tar_of({"big": b"x" * (32 << 20)})),
    ):
        with pytest.raises(corral.DiskFull):
            upload()
    assert not sandbox.files.exists("/big")
    sandbox.files.remove("/tmp/big") if sandbox.files.exists("/tmp/big") else None
    assert sandbox.files.write("/small", "x").size_bytes == 1


def test_a_watch_tells_changes(box: corral.Sandbox) -> None:
    box.files.mkdir("/w/sub", parents=True)
    events = box.files.watch("/w", recursive=True)
    assert next(events).event == "ready"
    box.exec("echo 1 > /w/a; echo 2 >> /w/a; mkdir /w/sub/new; echo 3 > /w/sub/b; rm /w/a", check=True)
    seen = set()
    while ("removed", "a") not in seen:
        event = next(events)
        seen.add((event.event, event.path))
    events.close()
    assert {("created", "a"), ("modified", "a"), ("created", "sub/b"), ("created", "sub/new")} <= seen


@pytest.mark.timeout(600)
def test_a_gibibyte_in_constant_memory(server: Server, make: Make, tmp_path: Path) -> None:
    size = 1 << 30
    block = hashlib.sha512(b"seed").digest() * 16384  # 1 MiB
    source = tmp_path / "big"
    digest = hashlib.sha256()
    with source.open("wb") as out:
        for n in range(size >> 20):
            piece = n.to_bytes(8, "big") + block[8:]
            digest.update(piece)
            out.write(piece)
    sandbox = make(limits=corral.Limits(memory_mib=256, pids=64, disk_mib=1400))
    before = rss_bytes(server.pid)
    assert sandbox.files.upload(source, "/big").size_bytes == size
    assert sandbox.exec(["sha256sum", "/big"], timeout=300).stdout.split()[0] == digest.hexdigest()
    source.unlink()
    copy = sandbox.files.download("/big", tmp_path / "copy")
    again = hashlib.sha256()
    with copy.open("rb") as file:
        while piece := file.read(1 << 20):
            again.update(piece)
    assert again.hexdigest() == digest.hexdigest()
    assert rss_bytes(server.pid, "VmHWM") - before < 64 << 20


def test_a_tar_stream_may_carry_owners(server: Server, box: corral.Sandbox) -> None:
    def entry(name: str, kind: bytes, uid: int, mode: int = 0o640) -> tarfile.TarInfo:
        info = tarfile.TarInfo(name)
        info.type, info.uid, info.gid, info.mode, info.linkname = kind, uid, uid, mode, "to"
        return info

    def stream(*entries: tarfile.TarInfo) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for info in entries:
                archive.addfile(info)
        return out.getvalue()

    given = stream(
        entry("d", tarfile.DIRTYPE, 1000, 0o750),
        entry("d/f", tarfile.REGTYPE, 65535, 0o4750),
        entry("l", tarfile.SYMTYPE, 7),
    )
    look = "cd /tmp/in; stat -c '%u:%g %a %n' d d/f; stat -c '%u:%g %n' l"
    with server.http() as http:
        to = f"/v1/sandboxes/{box.id}/files/tar"
        assert http.put(to, params={"path": "/tmp/in", "owners": "true"}, content=given).status_code == 204
        assert box.exec(look, check=True).stdout == "1000:1000 750 d\n65535:65535 4750 d/f\n7:7 l\n"
        box.exec("rm -r /tmp/in", check=True)
        assert http.put(to, params={"path": "/tmp/in"}, content=given).status_code == 204
        assert box.exec(look, check=True).stdout == "0:0 750 d\n0:0 4750 d/f\n0:0 l\n"
        answer = http.put(
            to, params={"path": "/tmp/a", "user": "agent", "owners": "true"}, content=given[:512] + bytes(1024)
        )
        assert answer.status_code == 204, "an owner may be who one is"
        answer = http.put(to, params={"path": "/tmp/b", "user": "agent", "owners": "true"}, content=given)
        assert answer.json()["kind"] == "permission_denied"
        large = stream(entry("f", tarfile.REGTYPE, 65536))
        answer = http.put(to, params={"path": "/tmp/c", "owners": "true"}, content=large)
        assert (answer.status_code, answer.json()["kind"]) == (422, "invalid_image"), answer.text


def test_a_tar_stream_leaves_mounts_out(server: Server, box: corral.Sandbox) -> None:
    with server.http() as http:
        answer = http.get(f"/v1/sandboxes/{box.id}/files/tar", params={"path": "/"})
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        names = {name.split("/")[0] for name in archive.getnames()}
    assert {"bin", "etc", "tmp"} <= names
    assert not names & {"proc", "sys", "dev"}
