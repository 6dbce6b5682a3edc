"""Images as archives: what other engines load, and what they run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import corral
from conftest import SMALL
from support import Server, until, with_busybox

WRITE = """
set -e
mkdir /data; echo kept > /data/f; chmod 640 /data/f; chown 7:8 /data/f; ln /data/f /data/hard
rm /bin/ls; rm -r /home; mkdir /home; echo fresh > /home/new
"""
LOOK = "stat -c '%n %a %u %g %h' /data/f /data/hard; cat /data/hard /home/new; [ -e /bin/ls ] || echo no ls"


@pytest.fixture
def exported(server: Server, client: corral.Client, box: corral.Sandbox, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A snapshot's name and its archive."""
    name = f"team/export-{uuid.uuid4().hex[:12]}:v1"
    box.exec(WRITE, check=True)
    box.snapshot(name)
    yield name, client.images.export(name, tmp_path / "image.tar")
    client.images.delete(name)


def run(*words: str | Path, timeout: float = 120) -> str:
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


@pytest.fixture
def docker(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Debian's engine, with everything it has below the test's directory, without a network."""
    socket, group = tmp_path / "docker.sock", f"corral-test-docker-{os.getpid()}"
    # Its own mounts end with it.
    words = ["unshare", "--mount", "--propagation", "private", "dockerd"]
    words += [f"--data-root={tmp_path}/data", f"--exec-root={tmp_path}/exec", f"--pidfile={tmp_path}/pid"]
    words += [f"--host=unix://{socket}", f"--cgroup-parent={group}", "--exec-opt=native.cgroupdriver=cgroupfs"]
    words += ["--bridge=none", "--iptables=false", "--ip-forward=false", "--storage-driver=overlay2"]
    with open(tmp_path / "dockerd.log", "wb") as log:
        engine = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    client = ["docker", "-H", f"unix://{socket}"]
    try:

        def answers() -> bool:
            assert engine.poll() is None, (tmp_path / "dockerd.log").read_text()[-2000:]
            return subprocess.run([*client, "version"], capture_output=True, timeout=60, check=False).returncode == 0

        until(answers, 60)
        yield lambda *words: run(*client, *words)
    finally:
        engine.terminate()
        try:
            engine.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(engine.pid, 9)
            engine.wait(30)
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        # Its threads leave their groups a moment later.
        until(lambda: all(_removed(path) for path in Path("/sys/fs/cgroup").glob(f"**/{group}")), 30)


def _removed(group: Path) -> bool:
    for below, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(below)
    return not group.exists()


def test_docker_loads_and_runs_it(docker: Callable[..., str], exported: tuple[str, Path]) -> None:
    name, archive = exported
    assert docker("load", "-i", str(archive)).strip() == f"Loaded image: {name}"
    settings = json.loads(docker("image", "inspect", name))[0]
    assert settings["Architecture"] == "amd64"
    told = docker("run", "--rm", "--network=none", name, "sh", "-c", LOOK)
    assert told.splitlines()[:4] == ["/data/f 640 7 8 2", "/data/hard 640 7 8 2", "kept", "fresh"]
    assert told.endswith("no ls\n")


def test_skopeo_reads_both_forms(exported: tuple[str, Path], tmp_path: Path) -> None:
    _, archive = exported
    as_docker = json.loads(run("skopeo", "inspect", f"docker-archive:{archive}"))
    as_layout = json.loads(run("skopeo", "inspect", f"oci-archive:{archive}:v1"))
    assert as_docker["Layers"] == as_layout["Layers"]
    assert as_docker["Env"] == as_layout["Env"]
    # A copy checks every digest.
    run("skopeo", "copy", "--quiet", f"oci-archive:{archive}:v1", f"dir:{tmp_path / 'copy'}")


def test_it_comes_back_as_it_was(
    server: Server, client: corral.Client, box: corral.Sandbox, exported: tuple[str, Path]
) -> None:
    name, archive = exported
    again = f"again-{uuid.uuid4().hex[:12]}"
    client.images.import_file(archive, again)
    try:
        assert not client.images.diff(name, from_=again).entries
        with client.sandboxes.create(again, limits=SMALL) as restored:
            assert restored.exec(LOOK).stdout == box.exec(LOOK).stdout
    finally:
        client.images.delete(again)


def test_by_the_command_line(server: Server, client: corral.Client, exported: tuple[str, Path], tmp_path: Path) -> None:
    name, archive = exported
    done = server.cli("image", "export", name, "-o", str(tmp_path / "again.tar"))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert (tmp_path / "again.tar").read_bytes() == archive.read_bytes()
    assert server.cli("image", "export", name).stdout == archive.read_bytes()
    # What is no file takes the bytes, and a link stays one.
    device, link = tmp_path / "null", tmp_path / "link.tar"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    link.symlink_to("again.tar")
    assert server.cli("image", "export", name, "-o", str(device)).returncode == 0
    client.images.export(name, device)
    assert stat.S_ISCHR(device.lstat().st_mode)
    assert server.cli("image", "export", name, "-o", str(link)).returncode == 0
    assert link.is_symlink()
    link.unlink()
    missing = server.cli("image", "export", "none", "-o", str(tmp_path / "none.tar"))
    assert missing.returncode == 1
    assert b"none" in missing.stderr
    assert sorted(p.name for p in tmp_path.glob("*.tar")) == ["again.tar", "image.tar"]


def test_one_that_breaks_off_leaves_no_file(tmp_path: Path) -> None:
    server = Server()
    with with_busybox(server, tmp_path) as client:
        with client.sandboxes.create("bb", limits=SMALL) as box:
            box.exec("head -c 40000000 /dev/urandom > /big", check=True)
            box.snapshot("big")
        with contextlib.closing(client.images.open_export("big")) as source:
            next(source)
            server.kill()
            with pytest.raises(corral.CorralError):
                for _ in source:
                    pass
        server.start()
        with server.client() as later:
            with pytest.raises(corral.NotFound):
                later.images.export("none", tmp_path / "none.tar")
            later.images.export("big", tmp_path / "big.tar")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["bb.tar", "big.tar"]
