#!/usr/bin/env python3
"""Builds the images of the burst from Debian's packages, and keeps them as layers in target/bench.

The versions of all packages are pinned in bench/corpus.lock. Run as a program with `--lock`, it installs what Debian
has now and writes that file anew. CORRAL_BENCH_MIRROR names another mirror, such as one of Debian's snapshots.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from disk import Disk
from process import Failed, run, say
from tasks import BASE, IMAGES, STACKS, SUITE, Image

REPOSITORY = Path(__file__).resolve().parent.parent
LOCK = REPOSITORY / "bench/corpus.lock"
TARGET = REPOSITORY / "target/bench"
BUILDERS = 2
LEAST_BYTES = 300_000_000
PIECE = 1 << 20
WHAT_TO_DO = (
    "where Debian has no such version any more, set CORRAL_BENCH_MIRROR to a mirror that keeps old ones, or have"
    " `.venv/bin/python bench/corpus.py --lock` resolve them anew: figures measured before are then of other images"
)

# Runs in namespaces of its own, so that nothing stays mounted. What apt keeps lies beside the tree.
INSTALL = r"""
root=$1 lower=$2 upper=$3 work=$4 lists=$5 cache=$6
shift 6
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$upper,workdir=$work,redirect_dir=off,metacopy=off" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
mount --bind "$lists" "$root/var/lib/apt/lists"
mount --bind "$cache" "$root/var/cache/apt"
mount --bind /etc/resolv.conf "$root/etc/resolv.conf"
export DEBIAN_FRONTEND=noninteractive LC_ALL=C PATH=/usr/sbin:/usr/bin:/sbin:/bin
exec chroot "$root" "$@"
"""
APT = [
    "apt-get",
    "-qq",
    "-o=APT::Sandbox::User=root",
    "-o=Dpkg::Options::=--force-unsafe-io",
    "-o=Dpkg::Use-Pty=0",
    "-o=Acquire::Languages=none",
]


class Corpus:
    """The images, as tars of their layers."""

    def __init__(self, packages: dict[str, list[str]], directory: Path) -> None:
        self.packages, self.directory = packages, directory

    @staticmethod
    def pinned() -> Corpus:
        """The images of bench/corpus.lock."""
        text = LOCK.read_text()
        return Corpus(_read(text), TARGET / f"corpus-{hashlib.sha256(text.encode()).hexdigest()[:12]}")

    def ensure(self) -> None:
        """Builds what is missing."""
        names = ["base", *STACKS, *(image.name for image in IMAGES)]
        missing = [name for name in names if not self._note(name).exists()]
        if missing:
            self.directory.mkdir(parents=True, exist_ok=True)
            say(f"building {len(missing)} layers of the burst's images into target/bench: minutes, once")
            # On a disk of its own, which is forgotten faster than so many files are removed.
            with Disk(self.directory / "work") as disk:
                _Workshop(self, disk.at).build(set(missing))
        for image in IMAGES:
            if self.bytes_of(image) < LEAST_BYTES:
                raise Failed(f"image {image.name} has only {self.bytes_of(image) / 1e6:.0f} MB")

    def tar(self, layer: str) -> Path:
        """A layer's tar."""
        return self.directory / f"{layer}.tar"

    def _note(self, layer: str) -> Path:
        return self.directory / f"{layer}.json"

    def note(self, layer: str, upper: Path, before: set[str], after: set[str]) -> None:
        """Keeps a layer that was built."""
        packages = sorted(after - before)
        diff_id, size = _pack(upper, self.tar(layer))
        note = {"diff_id": diff_id, "bytes": size, "packages": packages}
        self._note(layer).write_text(json.dumps(note) + "\n")
        say(f"  {layer}: {len(packages)} packages, {size / 1e6:.0f} MB")

    def told(self, layer: str) -> dict[str, Any]:
        """What is known of a layer: `diff_id`, `bytes`, `packages`."""
        return dict(json.loads(self._note(layer).read_text()))

    def bytes_of(self, image: Image) -> int:
        """Bytes of the files of an image."""
        return sum(self.told(layer)["bytes"] for layer in layers_of(image))

    def archive(self, images: list[Image]) -> Archive:
        """What `docker save` of these images would write: each layer once."""
        archive = Archive()
        for layer in dict.fromkeys(layer for image in images for layer in layers_of(image)):
            archive.add(f"{layer}.tar", self.tar(layer))
        manifest = []
        for image in images:
            ids = [self.told(layer)["diff_id"] for layer in layers_of(image)]
            config = {
                "architecture": "amd64",
                "os": "linux",
                "config": {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]},
                "rootfs": {"type": "layers", "diff_ids": ids},
            }
            archive.add(f"{image.name}.json", json.dumps(config).encode())
            names = [f"{layer}.tar" for layer in layers_of(image)]
            tag = f"{image.name}:burst"
            manifest.append({"Config": f"{image.name}.json", "RepoTags": [tag], "Layers": names})
        archive.add("manifest.json", json.dumps(manifest).encode())
        return archive


class Archive:
    """A tar that is made while it is sent: on the disk it would lie twice."""

    def __init__(self) -> None:
        self.parts: list[tuple[bytes, bytes | Path, int]] = []

    def add(self, name: str, content: bytes | Path) -> None:
        """Adds a member."""
        info = tarfile.TarInfo(name)
        info.size = len(content) if isinstance(content, bytes) else content.stat().st_size
        self.parts.append((info.tobuf(tarfile.GNU_FORMAT), content, info.size))

    def __len__(self) -> int:
        blocks = (len(head) + size + -size % tarfile.BLOCKSIZE for head, _, size in self.parts)
        return sum(blocks) + 2 * tarfile.BLOCKSIZE

    def __iter__(self) -> Iterator[bytes]:
        for head, content, size in self.parts:
            yield head
            if isinstance(content, bytes):
                yield content
            else:
                with open(content, "rb") as file:
                    while piece := file.read(PIECE):
                        yield piece
            yield bytes(-size % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)


def layers_of(image: Image) -> list[str]:
    """Names of an image's layers, the lowest first."""
    return ["base", image.stack, image.name]


class _Workshop:
    """Trees and caches while layers are built."""

    def __init__(self, corpus: Corpus, directory: Path) -> None:
        self.corpus, self.directory = corpus, directory
        self.base = self.directory / "base"
        self.lists = self.directory / "lists"

    def build(self, missing: set[str]) -> None:
        """Builds layers: a stack's tree is made also where only an image on it is missing."""
        self._bootstrap()
        stacks = {image.stack for image in IMAGES if image.name in missing} | (missing & set(STACKS))
        with ThreadPoolExecutor(BUILDERS) as pool:
            found = dict(zip(sorted(stacks), pool.map(self._stack, sorted(stacks)), strict=True))
            images = [image for image in IMAGES if image.name in missing]
            list(pool.map(lambda image: self._image(image, found[image.stack]), images))

    def _bootstrap(self) -> None:
        if shutil.which("mmdebstrap") is None:
            raise Failed("mmdebstrap is missing: run `make setup`")
        mirror = os.environ.get("CORRAL_BENCH_MIRROR")
        include = f"--include={','.join(BASE)}"
        command: list[str | Path] = ["mmdebstrap", "--quiet", "--variant=minbase", include, SUITE, self.base]
        run([*command, mirror] if mirror else command, 900)
        # Bound over while more is installed; in the image it would be the host's.
        (self.base / "etc/resolv.conf").write_text("")
        found, wanted = _installed(self.base), set(self.corpus.packages.get("base", ()))
        if wanted and found != wanted:
            other = sorted(found ^ wanted)
            raise Failed(f"the base's packages are not those pinned, such as {other[0]}: {WHAT_TO_DO}")
        self.corpus.note("base", self.base, set(), found)
        self.lists.mkdir()
        self._inside("update", self.base, [*APT, "update"])

    def _stack(self, stack: str) -> Path:
        return self._layer(stack, str(self.base), STACKS[stack], _installed(self.base))

    def _image(self, image: Image, stack: Path) -> None:
        lower = f"{stack}:{self.base}"
        before = _installed(self.directory / f"{image.stack}.done")
        upper = self._layer(image.name, lower, image.packages, before)
        shutil.rmtree(upper.parent)

    def _layer(self, name: str, lower: str, packages: Iterable[str], before: set[str]) -> Path:
        words = self.corpus.packages.get(name) or list(packages)
        upper = self._inside(name, lower, [*APT, "install", "-y", "--no-install-recommends", *words])
        # The tree's list of packages lies in the topmost layer that installed any.
        done = self.directory / f"{name}.done/var/lib/dpkg"
        done.mkdir(parents=True)
        if not (upper / "var/lib/dpkg/status").exists():
            raise Failed(f"layer {name}: all of its packages are in the layers below")
        shutil.copy(upper / "var/lib/dpkg/status", done)
        self.corpus.note(name, upper, before, _installed(self.directory / f"{name}.done"))
        return upper

    def _inside(self, name: str, lower: str | Path, command: list[str]) -> Path:
        place = self.directory / name
        parts = {part: place / part for part in ("root", "upper", "overlay", "cache")}
        for part in parts.values():
            part.mkdir(parents=True)
        (parts["cache"] / "archives/partial").mkdir(parents=True)
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation=private"]
        trees = [parts["root"], lower, parts["upper"], parts["overlay"], self.lists, parts["cache"]]
        try:
            run([*unshare, "sh", "-euc", INSTALL, "install", *map(str, trees), *command], 1800)
        except Failed as failure:
            raise Failed(f"layer {name}: {failure}; {WHAT_TO_DO}") from None
        shutil.rmtree(parts["cache"])
        return parts["upper"]


def _installed(root: Path) -> set[str]:
    """Packages of a tree, with versions."""
    admin = f"--admindir={root}/var/lib/dpkg"
    return set(run(["dpkg-query", admin, "-W", "-f=${Package}=${Version}\n"], 60).split())


def _pack(tree: Path, path: Path) -> tuple[str, int]:
    """A tar of an overlay's upper directory, deletions as image layers have them: its digest, bytes of its files."""
    part, total = path.with_suffix(".part"), 0
    with tarfile.open(part, "w", format=tarfile.PAX_FORMAT) as tar:
        for at, directories, files in os.walk(tree):
            directories.sort()
            where = Path(at)
            if where != tree:
                tar.add(where, where.relative_to(tree), recursive=False)
                if _is_opaque(where):
                    _add(tar, f"{where.relative_to(tree)}/.wh..wh..opq", b"")
            links = [name for name in directories if (where / name).is_symlink()]
            for name in sorted([*files, *links]):
                member, told = (where / name).relative_to(tree), (where / name).lstat()
                if stat.S_ISCHR(told.st_mode) and told.st_rdev == 0:
                    _add(tar, str(member.with_name(f".wh.{name}")), b"")
                elif not stat.S_ISSOCK(told.st_mode):
                    tar.add(where / name, member, recursive=False)
                    total += told.st_size if stat.S_ISREG(told.st_mode) else 0
    diff_id = run(["sha256sum", part], 300).split()[0]
    part.rename(path)
    return f"sha256:{diff_id}", total


def _is_opaque(directory: Path) -> bool:
    try:
        return os.getxattr(directory, "trusted.overlay.opaque") == b"y"
    except OSError:
        return False


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    tar.addfile(info, io.BytesIO(content))


def _read(text: str) -> dict[str, list[str]]:
    packages: dict[str, list[str]] = {}
    layer = ""
    for line in text.splitlines():
        if line.startswith("["):
            layer = line.strip("[]")
        elif line and not line.startswith("#"):
            packages.setdefault(layer, []).append(line)
    return packages


def main() -> int:
    """Resolves the packages anew, or builds what is pinned."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lock", action="store_true", help="install what Debian has now, and pin that")
    try:
        if not parser.parse_args().lock:
            Corpus.pinned().ensure()
            return 0
        # Goes on where an earlier try stopped.
        corpus = Corpus({}, TARGET / "corpus-new")
        corpus.ensure()
        lines = [f"# Packages of each layer of the burst's images, {SUITE}; written by bench/corpus.py --lock."]
        for layer in ["base", *STACKS, *(image.name for image in IMAGES)]:
            lines += [f"[{layer}]", *corpus.told(layer)["packages"]]
        LOCK.write_text("\n".join(lines) + "\n")
        corpus.directory.rename(Corpus.pinned().directory)
    except Failed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
