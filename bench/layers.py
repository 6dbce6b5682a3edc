"""What layers cost: packing, forking, rolling back, reading, and storing a second image on a known base."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import statistics
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corral

from node import Node
from process import Failed, run, say
from results import Found

# 2,000 files, 55 MB, 40 directories.
FILL = (
    "mkdir /w; for d in $(seq 1 40); do mkdir /w/$d;"
    " for i in $(seq 1 50); do head -c 27500 /dev/urandom > /w/$d/$i; done; done"
)
# 200 MB in 40 files.
BIG = "mkdir /big; for n in $(seq 1 40); do head -c 5000000 /dev/urandom > /big/$n; done"
LIMITS = corral.Limits(memory_mib=512, disk_mib=1024)
MS_RDONLY = 1
PIECES = 4000
REPEATS = 9
DELTABOX = "DeltaBox tells 10.8 ms for a checkpoint and 1.9 ms for a rollback"

# A base as small images have it, and what two of them add.
BASE = ("base-files", "bash", "coreutils", "libc6", "libgcc-s1", "libstdc++6", "libssl3", "perl-base", "tar", "apt")
FIRST = ("libpython3.11-minimal", "libpython3.11-stdlib", "git")
SECOND = ("vim-common", "vim-runtime", "curl", "libcurl4")


class Layers:
    """A node with a shared store."""

    def __init__(self, libexec: Path, load: Path, directory: Path, archive: Path, samples: int) -> None:
        self.libexec, self.load, self.directory, self.archive = libexec, load, directory, archive
        self.samples = samples
        self.node: Node | None = None
        self.mounts: list[Path] = []

    def changes(self) -> dict[str, Found]:
        """Packing, forking and taking back what a sandbox wrote."""
        say("snapshot, fork, rollback of 2,000 files of 55 MB")
        client = self._node("changes").client()
        box = client.sandboxes.create("bench", limits=LIMITS)
        box.exec(FILL, check=True)
        checkpoint = box.checkpoint()
        origin = None
        pack: list[float] = []
        fork: list[float] = []
        back: list[float] = []
        for turn in range(1, self.samples + 1):
            # Not the same tree twice: what is there already would not be written.
            box.exec(f"echo {turn} > /w/turn; sync", check=True)
            origin = box.snapshot(f"turn{turn}").snapshot
            pack.append(origin.report.pack_ms if origin else 0.0)
            fork.append(_median_ms(lambda: self._fork(box)))
            back.append(_median_ms(lambda: box.rollback(checkpoint)))
            say(f"  {turn}: packed in {pack[-1]:.0f} ms, forked in {fork[-1]:.1f} ms, rolled back in {back[-1]:.1f} ms")
        assert origin is not None
        frozen = f"stood still for {origin.report.frozen_us} µs, upload to a directory {origin.report.upload_ms} ms"
        return {
            "pack_diff_ms": Found(statistics.median(pack), pack, note=frozen),
            "fork_first_command_p50_ms": Found(
                statistics.median(fork), fork, note=f"medians of {REPEATS}, through the Python client"
            ),
            "rollback_p50_ms": Found(
                statistics.median(back),
                back,
                note=f"medians of {REPEATS}; checkpoint took {checkpoint.frozen_us} µs; {DELTABOX}",
            ),
        }

    @staticmethod
    def _fork(box: corral.Sandbox) -> Callable[[], object]:
        [made] = box.fork()
        if isinstance(made, corral.CorralError):
            raise Failed(f"fork: {made}")
        made.exec(["true"], check=True)
        return made.delete

    def reads(self) -> dict[str, Found]:
        """Reads of a layer that is here, and of one that the lazy server serves, against a plain mount of the tree."""
        say("reads of layers")
        node = self._node("reads")
        with node.client().sandboxes.create("bench", limits=LIMITS) as box:
            box.exec(BIG, check=True)
            digest = box.snapshot("big").layers[-1].digest.removeprefix("sha256:")
        mounts = node.directory / "layers/mounts"
        with node.client().sandboxes.create("big", limits=LIMITS) as box:
            box.exec("true", check=True)
            plain = self._plain_mount(mounts / digest)
            ours, baseline = self._in_turns(mounts / digest / "big", plain / "big", None)
            anywhere, anywhere_baseline = self._in_turns(mounts / digest / "big", plain / "big", PIECES)
        node.stop()
        shutil.rmtree(node.directory / "layers")
        node.start()
        # One file stays unread, so the layer does not become complete.
        lazy = mounts / f"{digest}.lazy"
        with node.client().sandboxes.create("big", limits=LIMITS) as box:
            box.exec("cd /big; for n in $(seq 1 39); do cat $n; done > /dev/null", check=True)
            seen = self._in_turns(lazy / "big", plain / "big", None, *map(str, range(1, 40)))
        return {
            "warm_seq_vs_erofs": _ratio(ours, baseline, "bytes local, page cache of the mounts dropped"),
            "warm_random_vs_erofs": _ratio(anywhere, anywhere_baseline, f"{PIECES} pieces of 16 KiB"),
            "lazy_warm_vs_erofs": _ratio(*seen, "bytes fetched, page cache of the mounts dropped"),
        }

    def _in_turns(self, ours: Path, plain: Path, random: int | None, *names: str) -> tuple[list[float], list[float]]:
        """Bytes a second of both, the order changed each turn; a first turn is not counted."""
        found: tuple[list[float], list[float]] = ([], [])
        for turn in range(self.samples + 1):
            arms = list(zip((ours, plain), found, strict=True))
            for directory, rates in arms if turn % 2 else arms[::-1]:
                rate = self._rate(directory, random, names)
                if turn:
                    rates.append(rate)
        say(f"  {ours.parent.name[-8:]}: {found[0][-1] / 1e6:.0f} MB/s, plain {found[1][-1] / 1e6:.0f} MB/s")
        return found

    def _rate(self, directory: Path, random: int | None, names: tuple[str, ...]) -> float:
        words: list[str | Path] = [self.load, "read", directory, *names]
        if random is not None:
            words += ["--random", str(random)]
        return float(json.loads(run(words, 120))["per_second"])

    def _plain_mount(self, tree: Path) -> Path:
        """An EROFS image of a tree, as mkfs.erofs makes it, mounted from its file."""
        if shutil.which("mkfs.erofs") is None:
            raise Failed("mkfs.erofs is missing: install erofs-utils")
        image, point = self.directory / "plain.erofs", self.directory / "plain"
        point.mkdir()
        run(["mkfs.erofs", "--quiet", image, tree], 120)
        # From the file, as layers are: mount(8) would put a loop device between.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(bytes(image), bytes(point), b"erofs", MS_RDONLY, b"directio") != 0:
            raise Failed(f"mount {image}: {os.strerror(ctypes.get_errno())}")
        self.mounts.append(point)
        return point

    def dedupe(self) -> dict[str, Found]:
        """How much of the files that a store has is stored again with a second image on the same base."""
        say("a second image on the same base")
        packages = self._packages()
        first = self._tree("first", packages, (*BASE, *FIRST))
        second = self._tree("second", packages, (*BASE, *SECOND))
        present = _digests(first)
        new = self._archive(second, "second-new", lambda path: _digest(path) not in present)
        old = self._archive(second, "second-old", lambda path: _digest(path) in present)
        node = self._node("dedupe")
        node.import_image("first", self._archive(first, "first"))
        before = _size(self._store("dedupe"))
        node.import_image("second", self._archive(second, "second-all"))
        growth = _size(self._store("dedupe")) - before
        alone = {name: self._alone(name, archive) for name, archive in (("new", new), ("old", old))}
        ratio = (growth - alone["new"]) / alone["old"]
        note = (
            f"first image {before / 1e6:.1f} MB stored, second added {growth / 1e6:.1f} MB;"
            f" its new files alone {alone['new'] / 1e6:.1f} MB, the others {alone['old'] / 1e6:.1f} MB"
        )
        say(f"  {ratio:.3f}: {note}")
        return {"dedupe_second_image_ratio": Found(ratio, [ratio], note=note)}

    def _alone(self, name: str, archive: Path) -> int:
        """What an image takes in an empty store, without what the bench's own takes."""
        node = self._node(name)
        before = _size(self._store(name))
        node.import_image(name, archive)
        return _size(self._store(name)) - before

    def _packages(self) -> dict[str, Path]:
        """Packages by name, as the distribution has them."""
        directory = self.directory / "packages"
        directory.mkdir(exist_ok=True)
        names = sorted({*BASE, *FIRST, *SECOND})
        # As root, apt's own user could not write here.
        run(["apt-get", "-o", "APT::Sandbox::User=root", "download", *names], 300, cwd=directory)
        return {path.name.split("_", 1)[0]: path for path in directory.glob("*.deb")}

    def _tree(self, name: str, packages: dict[str, Path], wanted: tuple[str, ...]) -> Path:
        tree = self.directory / name
        for package in wanted:
            run(["dpkg-deb", "-x", packages[package], tree], 120)
        return tree

    def _archive(self, tree: Path, name: str, want: Callable[[Path], bool] = lambda _: True) -> Path:
        """A tar of a tree, or of the files in it that are wanted."""
        archive = self.directory / f"{name}.tar"
        with tarfile.open(archive, "w") as tar:
            for path in sorted(tree.rglob("*")):
                if path.is_symlink() or not path.is_file() or want(path):
                    tar.add(path, path.relative_to(tree), recursive=False)
        return archive

    def _store(self, name: str) -> Path:
        return self.directory / f"{name}-store"

    def _node(self, name: str) -> Node:
        """A node of its own with a store of its own, started, in the place of the last: each takes gigabytes."""
        self._end()
        self._store(name).mkdir(parents=True)
        options = f"--store=file://{self._store(name)}"
        self.node = Node(self.libexec, self.load, self.directory / name, self.archive, options)
        self.node.start()
        return self.node

    def _end(self) -> None:
        if self.node is not None:
            self.node.remove()
            self.node = None

    def remove(self) -> None:
        """Ends the nodes and removes everything."""
        with contextlib.ExitStack() as all_of_it:
            all_of_it.callback(shutil.rmtree, self.directory, ignore_errors=True)
            for point in self.mounts:
                all_of_it.callback(run, ["umount", point], 30)
            all_of_it.callback(self._end)


def _median_ms(what: Callable[[], Any]) -> float:
    """How long it takes, in the middle; what it returns clears up, outside of the time."""
    took = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        after = what()
        took.append((time.perf_counter() - begun) * 1000)
        if callable(after):
            after()
    return statistics.median(took)


def _ratio(ours: list[float], baseline: list[float], note: str) -> Found:
    return Found(statistics.median(ours) / statistics.median(baseline), ours, baseline, note)


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def _digests(tree: Path) -> set[bytes]:
    return {_digest(path) for path in tree.rglob("*") if path.is_file() and not path.is_symlink()}


def _size(store: Path) -> int:
    """Bytes of the objects in a store that is a directory."""
    return sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
