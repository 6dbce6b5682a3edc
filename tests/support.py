"""What the black-box tests stand on: a real node, images, and a look at what it leaves on the host."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx

import corral

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(os.environ.get("CORRAL_BIN", ROOT / "target" / "release" / "corral"))
LIBEXEC = Path(os.environ.get("CORRAL_LIBEXEC", ROOT / "target" / "libexec"))
DISK = Path(os.environ.get("CORRAL_TEST_DIR", "/var/tmp"))

START_SECONDS = 60
"""A node that takes over hundreds of sandboxes is ready long before."""

T = TypeVar("T")


def until(found: Callable[[], T | None], seconds: float = 30, what: str = "") -> T:
    """Asks again and again until the answer is truthy, and returns it."""
    deadline = time.monotonic() + seconds
    while True:
        answer = found()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what or found}")
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`corral up` in a directory of its own; it can be killed and started anew."""

    def __init__(self, ephemeral: bool = False, *options: str) -> None:
        self.ephemeral = ephemeral
        self.options = options
        self.scratch = Path(
            subprocess.check_output(["mktemp", "-d", str(DISK / "corral-test-XXXXXX")], text=True).strip()
        )
        self.data = self.scratch / "data"
        self.log = self.scratch / "log"
        self.credentials = self.scratch / "credentials.json"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self.port}"
        self.libexec = LIBEXEC
        self.key = ""
        self.node_id = ""

    @property
    def environment(self) -> dict[str, str]:
        """For the node and for the command line client."""
        own = {
            "CORRAL_CREDENTIALS": str(self.credentials),
            "CORRAL_LIBEXEC": str(self.libexec),
            "HOME": str(self.scratch),
        }
        kept = {k: v for k, v in os.environ.items() if k not in {"CORRAL_API_URL", "CORRAL_API_KEY"}}
        return kept | own

    def start(self) -> Server:
        where = ["--ephemeral"] if self.ephemeral else ["--data-dir", str(self.data)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [PROGRAM, "--json", "up", *where, "--listen", f"127.0.0.1:{self.port}", *self.options],
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        line = self.process.stdout.readline() if readable else b""
        if not line:
            why = "ended" if readable else f"was not ready within {START_SECONDS} s"
            raise RuntimeError(f"corral up {why}:\n{self.tail()}")
        ready = json.loads(line)
        self.node_id, self.data = ready["node_id"], Path(ready["data_dir"])
        self.key = self.key or ready["key"]
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """kill -9 of the daemon; keepers and sandboxes live on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def keepers(self) -> list[int]:
        return [pid for pid, words in processes() if words[0].endswith("/corral-keeper") and str(self.data) in words[1]]

    def stop(self) -> int:
        """SIGTERM, and waits for the end."""
        assert self.process is not None
        self.process.terminate()
        try:
            return self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def tail(self, count: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def client(self, **options: Any) -> corral.Client:
        return corral.Client(self.url, self.key, **options)

    def cli(self, *words: str, stdin: bytes | None = None, timeout: float = 60) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [PROGRAM, *words],
            input=stdin if stdin is not None else b"",
            capture_output=True,
            env=self.environment,
            timeout=timeout,
            check=False,
        )

    def http(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {self.key}"}, timeout=60, trust_env=False
        )

    def answers(self) -> bool:
        """Whether the daemon is there for requests."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def end(self) -> None:
        """Removes every sandbox, stops the daemon and its keepers, and the directory."""
        if self.process is not None and self.process.poll() is None:
            if self.answers():
                if not self.ephemeral:
                    with self.client() as client:
                        for sandbox in list(client.sandboxes.list()):
                            if sandbox.state != "ended":
                                sandbox.delete()
                self.stop()
            else:
                self.kill()
        for pid in self.keepers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        until(lambda: not self.keepers(), 30, "the keepers end")
        # Where the daemon could not be asked to, what lived in its sandboxes is ended here.
        for directory in cgroups(f"corral-{self.node_id}", deep=True):
            for number in Path(directory, "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
        if not self.ephemeral:
            for mount in reversed([line for line in mounts() if str(self.data) in line]):
                subprocess.run(["umount", "-l", mount.split()[4]], check=False)
            until(lambda: not loops(self.data), 30, "the loop device is given back")
            for directory in cgroups(f"corral-{self.node_id}", deep=True):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def remains(self) -> dict[str, list[str]]:
        """What is left of it on the host."""
        return {
            "mounts": [line for line in mounts() if str(self.data) in line],
            "loop devices": loops(self.data),
            "cgroups": cgroups(f"corral-{self.node_id}"),
            "processes": [
                f"{pid} {' '.join(words)}" for pid, words in processes() if str(self.data) in " ".join(words)
            ],
            "directories": [str(self.data)] if self.ephemeral and self.data.exists() else [],
        }


@contextlib.contextmanager
def with_busybox(server: Server, scratch: Path, **options: Any) -> Iterator[corral.Client]:
    """Starts a node and imports the small image as ``bb``; ends it, and checks that nothing of it is left."""
    try:
        server.start()
        file = scratch / "bb.tar"
        file.write_bytes(busybox_rootfs())
        with server.client(**options) as client:
            client.images.import_file(file, "bb", kind="rootfs")
            yield client
    except BaseException:
        print(server.tail(60))
        raise
    finally:
        server.end()
        left = server.remains()
    assert not any(left.values()), left


def mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def loops(data: Path) -> list[str]:
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if str(data) in file.read_text():
                found.append(str(file))
    return found


def cgroup_roots() -> list[Path]:
    return [Path(line.split()[4]) for line in mounts() if " - cgroup" in line]


def cgroups(name: str, deep: bool = False) -> list[str]:
    """Control groups of this name; with ``deep`` those below, innermost first."""
    found: list[str] = []
    for top in cgroup_roots():
        for directory, below, _ in os.walk(top):
            if os.path.basename(directory) == name:
                inner = [d for d, _, _ in os.walk(directory, topdown=False)] if deep else [directory]
                found += inner
                below.clear()
    return found


def sandbox_cgroups(node_id: str) -> set[str]:
    """Ids of the sandboxes that have control groups."""
    names: set[str] = set()
    for directory in cgroups(f"corral-{node_id}"):
        names |= {
            entry.name for entry in os.scandir(directory) if entry.is_dir() and entry.name.startswith(f"s{node_id}")
        }
    return names


def host_pids(node_id: str, sandbox_id: str) -> set[int]:
    """Every process of a sandbox, as the host numbers them."""
    return {
        int(pid)
        for directory in cgroups(f"corral-{node_id}", deep=True)
        if sandbox_id in Path(directory).parts
        for pid in Path(directory, "cgroup.procs").read_text().split()
    }


def status_of(pid: int) -> dict[str, str]:
    """/proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def first_process(node_id: str, sandbox_id: str) -> int:
    """The host's number of a sandbox's PID 1."""
    return next(pid for pid in host_pids(node_id, sandbox_id) if status_of(pid)["NSpid"].split()[-1] == "1")


def processes() -> Iterator[tuple[int, list[str]]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                words = Path("/proc", entry, "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                if words != [b""]:
                    yield int(entry), [w.decode(errors="replace") for w in words] + [""]


def rss_bytes(pid: int, field: str = "VmRSS") -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(field))


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def tar_of(entries: Mapping[str, bytes | tarfile.TarInfo], links: dict[str, str] | None = None) -> bytes:
    """A tar archive of files (content or a whole header) and symbolic links."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, what in entries.items():
            if isinstance(what, tarfile.TarInfo):
                what.name = name
                archive.addfile(what, io.BytesIO(b"x" * what.size) if what.size else None)
                continue
            info = tarfile.TarInfo(name)
            info.mode, info.size = 0o644, len(what)
            if name.endswith("/"):
                info.type, info.mode, info.size = tarfile.DIRTYPE, 0o755, 0
            archive.addfile(info, io.BytesIO(what))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return out.getvalue()


def busybox_rootfs() -> bytes:
    """A root file system of busybox alone, with a user ``agent``."""
    program = Path(shutil.which("busybox") or "/bin/busybox")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:

        def add(
            name: str, data: bytes = b"", mode: int = 0o644, kind: bytes = tarfile.REGTYPE, link: str = "", uid: int = 0
        ) -> None:
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.type, info.linkname, info.uid, info.gid = len(data), mode, kind, link, uid, uid
            archive.addfile(info, io.BytesIO(data))

        for directory in ("bin", "etc", "proc", "sys", "dev", "root", "var", "usr", "home"):
            add(directory, mode=0o755, kind=tarfile.DIRTYPE)
        add("tmp", mode=0o1777, kind=tarfile.DIRTYPE)
        add("home/agent", mode=0o755, kind=tarfile.DIRTYPE, uid=1000)
        add("bin/busybox", program.read_bytes(), 0o755)
        applets = subprocess.check_output([program, "--list"], text=True).split()
        for applet in applets:
            if applet != "busybox":
                add(f"bin/{applet}", kind=tarfile.SYMTYPE, link="busybox")
        add("bin/suid", program.read_bytes(), 0o4755)
        add("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n")
        add("etc/group", b"root:x:0:\nagent:x:1000:\nextra:x:2000:agent\n")
    return out.getvalue()


def docker_archive(layers: list[bytes], config: dict[str, Any], tag: str) -> bytes:
    """A `docker save` archive made by hand."""
    import hashlib

    names = [f"layer{n}/layer.tar" for n in range(len(layers))]
    document = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(data).hexdigest() for data in layers]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": names}]
    files: dict[str, bytes | tarfile.TarInfo] = dict(zip(names, layers, strict=True))
    files |= {"config.json": json.dumps(document).encode(), "manifest.json": json.dumps(manifest).encode()}
    return tar_of(files)


def python_in(sandbox: corral.Sandbox, code: str, *words: str, **options: Any) -> corral.ExecResult:
    """Runs Python text inside."""
    return sandbox.exec(["python3", "-c", code, *words], timeout=options.pop("timeout", 60), **options)


if str(ROOT / "demo") not in sys.path:
    sys.path.insert(0, str(ROOT / "demo"))
