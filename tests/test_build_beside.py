"""The same Dockerfiles built here and by buildah: the same files, owners, modes and configuration."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import corral
from conftest import SMALL, Make
from support import Server, busybox_rootfs, tar_of

PLATFORM = {"proc", "sys", "dev", "run", "etc/hosts", "etc/hostname", "etc/resolv.conf", "etc", "tmp", "."}
"""What every sandbox, or every container of buildah, is given; and directories that this touches."""


class Buildah:
    """buildah with a store of its own: no daemon, no network, no user namespace."""

    def __init__(self, scratch: Path) -> None:
        policy = scratch / "policy.json"
        policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        registries = scratch / "registries.conf"
        registries.write_text('short-name-mode = "permissive"\n')
        self.policy = str(policy)
        self.environment = {**os.environ, "CONTAINERS_REGISTRIES_CONF": str(registries), "BUILDAH_ISOLATION": "chroot"}
        self.store = ["--root", str(scratch / "root"), "--runroot", str(scratch / "run"), "--storage-driver", "vfs"]
        self.made: list[str] = []

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            ["buildah", *self.store, *words], capture_output=True, text=True, env=self.environment, timeout=300
        )
        assert done.returncode == 0, f"buildah {' '.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def base(self, name: str, rootfs: Path) -> None:
        container = self("from", "scratch")
        self("add", container, str(rootfs), "/")
        self("commit", "--signature-policy", self.policy, "--rm", container, name)

    def build(self, context: Path, name: str) -> None:
        words = ["--isolation", "chroot", "--network", "host", "--pull-never", "--signature-policy", self.policy]
        self("bud", *words, "--layers=false", "--format", "docker", "-t", name, str(context))

    def tree(self, name: str) -> dict[str, tuple[object, ...]]:
        container = self("from", "--pull-never", "--signature-policy", self.policy, name)
        try:
            return tree_of_directory(Path(self("mount", container)))
        finally:
            self("umount", container)
            self("rm", container)

    def config(self, name: str) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self("inspect", "--type", "image", name))["OCIv1"]["config"]
        return config


def tree_of_directory(top: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for directory, below, names in os.walk(top):
        for name in [*below, *names]:
            path = Path(directory, name)
            status = path.lstat()
            what: object = ""
            if stat.S_ISLNK(status.st_mode):
                what = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                what = hashlib.sha256(path.read_bytes()).hexdigest()
            mode = 0 if stat.S_ISLNK(status.st_mode) else stat.S_IMODE(status.st_mode)
            kind = stat.S_IFMT(status.st_mode)
            found[str(path.relative_to(top))] = (kind, mode, status.st_uid, status.st_gid, what)
    return found


def tree_of_sandbox(server: Server, sandbox: corral.Sandbox) -> dict[str, tuple[object, ...]]:
    with server.http() as http:
        answer = http.get(f"/v1/sandboxes/{sandbox.id}/files/tar", params={"path": "/", "user": "0"})
    answer.raise_for_status()
    found: dict[str, tuple[object, ...]] = {}
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        for member in archive:
            what: object = ""
            kind = {tarfile.DIRTYPE: stat.S_IFDIR, tarfile.SYMTYPE: stat.S_IFLNK}.get(member.type, stat.S_IFREG)
            if member.issym():
                what = member.linkname
            elif member.isreg():
                content = archive.extractfile(member)
                assert content is not None
                what = hashlib.sha256(content.read()).hexdigest()
            mode = 0 if member.issym() else member.mode
            found[member.name.rstrip("/")] = (kind, mode, member.uid, member.gid, what)
    return found


def image_part(tree: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """Without what belongs to no image."""
    outside = ("proc/", "sys/", "dev/", "run/")
    return {path: what for path, what in tree.items() if path not in PLATFORM and not path.startswith(outside)}


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    if shutil.which("buildah") is None:
        print("buildah is not installed: nothing is compared with it")
        pytest.skip("buildah is not installed")
    scratch = tmp_path_factory.mktemp("buildah")
    made = Buildah(scratch)
    rootfs = scratch / "bb.tar"
    rootfs.write_bytes(busybox_rootfs())
    made.base("bb", rootfs)
    yield made
    # Layers of other owners: plain removal is enough for root.
    shutil.rmtree(scratch, ignore_errors=True)


FILES: dict[str, bytes | tarfile.TarInfo] = {
    "a.txt": b"a\n",
    "b.txt": b"b\n",
    "with space": b"s\n",
    "d/": b"",
    "d/x": b"x\n",
    "d/sub/": b"",
    "d/sub/y": b"y\n",
    "skip.log": b"",
    "keep.log": b"k\n",
    ".dockerignore": b"*.log\n!keep.log\nDockerfile\n",
    "in.tar": tar_of({"t/u": b"u\n"}, {"t/l": "u"}),
}

CASES = {
    "copies": """FROM bb
RUN mkdir -p /there /real && ln -s /real /link
COPY a.txt /there
COPY a.txt /file
COPY a.txt /dir/
COPY a.txt /link/
COPY *.txt /globbed/
COPY d /from-d
COPY d /deep/er/
COPY ["with space", "/sp ace/"]
COPY --chown=agent:extra a.txt /owned/by/
COPY --chown=7 d /owned-d
COPY --chmod=0711 a.txt /mode
COPY . /all
ADD in.tar /unpacked/
ADD a.txt in.tar /added/
""",
    "stages": """ARG BASE=bb
FROM $BASE AS one
ARG V=1
RUN mkdir /o && echo $V > /o/v && chown -R agent /o && chmod 640 /o/v && ln -s v /o/l
FROM one AS two
RUN echo 2 > /o/two
FROM bb
COPY --from=one /o /one
COPY --from=two /o/two /two
COPY --from=1 --chown=root:agent /o/v /given
""",
    "configuration": """FROM bb
ENV A=1 B="two words" C=x\\ y
ENV D $A and more
ENV E=${A:-no} F=${N:-none} G=${A:+set} H="$B" I='$B' J=\\$A
LABEL one=1 "two words"="$A"
WORKDIR /w
WORKDIR sub/../deep
RUN pwd > /pwd && echo "$B $C $D" > /vars
USER agent
RUN id -un > /tmp/who && touch /home/agent/mine
CMD ["first"]
ENTRYPOINT ["/bin/sh", "-c"]
""",
    "deletions": """FROM bb
RUN rm /bin/suid && rm -r /home && mkdir /home && echo new > /home/new
RUN rm /home/new && echo newer > /home/newer && chmod 4755 /bin/busybox
RUN mkdir -m 1777 /sticky && echo x > /sticky/f && chown 1000:2000 /sticky/f
CMD shell form
SHELL ["/bin/ash", "-ec"]
RUN false || true; echo $0 > /shell
""",
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_image(
    case: str, buildah: Buildah, client: corral.Client, server: Server, make: Make, bb: str, tmp_path: Path
) -> None:
    context = tmp_path / "context"
    context.mkdir()
    with tarfile.open(fileobj=io.BytesIO(tar_of({**FILES, "Dockerfile": CASES[case].encode()}))) as archive:
        archive.extractall(context, filter="fully_trusted")
    buildah.build(context, case)
    theirs, their_config = image_part(buildah.tree(case)), buildah.config(case)
    image = client.images.build(context, f"beside-{case}", limits=SMALL)
    try:
        sandbox = make(image.name, entrypoint=[])
        ours = image_part(tree_of_sandbox(server, sandbox))
        sandbox.delete()
        different = {
            path: (theirs.get(path), ours.get(path)) for path in theirs | ours if theirs.get(path) != ours.get(path)
        }
        assert not different
        config = image.config
        env = dict(pair.split("=", 1) for pair in their_config.get("Env", []))
        # buildah gives every image one, sandboxes have it without.
        env.pop("PATH", None)
        assert config.env == env
        assert list(config.cmd) == (their_config.get("Cmd") or [])
        assert list(config.entrypoint) == (their_config.get("Entrypoint") or [])
        assert config.user == their_config.get("User", "")
        assert (config.workdir or "/") == (their_config.get("WorkingDir") or "/")
        labels = {k: v for k, v in (their_config.get("Labels") or {}).items() if k != "io.buildah.version"}
        assert config.labels == labels
    finally:
        client.images.delete(image.name)
