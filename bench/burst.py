"""A burst of sandboxes over many images on a node that has none of them: lazily, pulled whole, and with Docker.

All arms take the same tasks, as many at a time, on disks of their own of one kind, with nothing in the page cache. The
two arms of Corral read one store, whose every answer is late by the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import shutil
import socket
import sqlite3
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import corral

from corpus import Corpus
from disk import Disk, drop_caches
from engine import Engine
from node import Node
from process import Failed, say
from remote import Remote
from results import Found
from tasks import IMAGES, STACKS, Image

CATALOGUE = "catalogue.sqlite"
EACH = 3
IN_FLIGHT = 16
LATENCIES_MS = (10, 1)
TASK_S = 300
# As much as a task may want: Docker's containers have no limits.
LIMITS = corral.Limits(memory_mib=4096, cpus=2, pids=4096)
TRACES_KEPT_AFTER_S = 60
DSEC = (0.042, 0.133)


@dataclass
class Run:
    """What one arm took once."""

    seconds: float
    written: int
    fetched: int = 0
    requests: int = 0
    # For each stack: bytes fetched, unpacked; bytes that readers asked for; bytes of its images' layers, each once.
    reads: dict[str, tuple[int, int, int]] = field(default_factory=dict)


class Burst:
    """The images, where they are kept, and the arms."""

    def __init__(self, libexec: Path, load: Path, directory: Path, samples: int, images: int) -> None:
        self.libexec, self.load, self.directory = libexec, load, directory
        self.samples = samples
        # As many of each stack.
        self.images = IMAGES if images >= len(IMAGES) else IMAGES[:: len(IMAGES) // images]
        self.corpus = Corpus.pinned()
        self.order = [image for image in self.images for _ in range(EACH)]
        random.Random(1).shuffle(self.order)

    def measure(self) -> dict[str, Found]:
        """All arms in turns."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.corpus.ensure()
        published = self.published()
        size = sum(self.corpus.bytes_of(image) for image in self.images)
        say(f"burst of {len(self.order)} over {len(self.images)} images of {size / 1e9:.1f} GB, {IN_FLIGHT} at a time")
        main, other = LATENCIES_MS
        arms: dict[str, Callable[[], Run]] = {
            "docker": self._docker,
            "lazy": lambda: self._corral(published, main),
            "pull": lambda: self._corral(published, main, whole=True),
        }
        runs: dict[str, list[Run]] = {name: [] for name in arms}
        for turn in range(1, self.samples + 1):
            for name in arms if turn % 2 else reversed(arms):
                runs[name].append(self._said(f"{turn} of {self.samples}, {name}", arms[name]()))
        # What the notes tell beside it, once.
        beside = {
            "near lazy": self._corral(published, other),
            "near pull": self._corral(published, other, whole=True),
            "recording": self._corral(published, main, traces=True, linger=TRACES_KEPT_AFTER_S + 5),
            "traced": self._corral(published, main, traces=True),
        }
        for name, found in beside.items():
            runs[name] = [self._said(name, found)]
        self._forget_traces(published)
        return _figures(runs, len(self.order), len(self.images))

    @staticmethod
    def _said(what: str, found: Run) -> Run:
        say(
            f"  {what}: {found.seconds:.1f} s, {found.written / 1e6:.0f} MB written,"
            f" {found.fetched / 1e6:.0f} MB fetched in {found.requests} requests"
        )
        return found

    def published(self) -> Path:
        """A directory with the store of the images, a catalogue that knows them, and its key. Made once a build."""
        program = hashlib.sha256((self.libexec / "corral").read_bytes()).hexdigest()[:12]
        kept = self.corpus.directory / f"store-{program}-{len(self.images)}"
        if kept.exists():
            return kept
        for old in [*self.corpus.directory.glob(f"store-*-{len(self.images)}"), self.corpus.directory / "store-part"]:
            shutil.rmtree(old, ignore_errors=True)
        say(f"publishing {len(self.images)} images to a store: minutes, once for each build of corral")
        part = self.corpus.directory / "store-part"
        (part / "store").mkdir(parents=True)
        # A node for each stack, as a node keeps what it publishes.
        for stack in STACKS:
            self._publish([image for image in self.images if image.stack == stack], part)
        part.rename(kept)
        return kept

    def _publish(self, images: list[Image], part: Path) -> None:
        key = part / "key"
        with Disk(self.directory / "publisher") as disk:
            store = f"--store=file://{part / 'store'}"
            if key.exists():
                node = self.node(part, disk, store)
            else:
                node = Node(self.libexec, self.load, disk.at / "node", None, store)
            try:
                node.start()
                for image in images:
                    archive = self.corpus.archive([image])
                    node.import_stream(image.name, "archive", archive, len(archive))
                    say(f"  {image.name}: {self.corpus.bytes_of(image) / 1e6:.0f} MB")
                node.stop()
                _copy_catalogue(node.directory, part)
                key.write_text(node.key)
            finally:
                node.remove()

    def node(self, published: Path, disk: Disk, *options: str) -> Node:
        """A node that knows the images and has nothing of them."""
        data = disk.at / "node"
        data.mkdir(mode=0o700)
        _copy_catalogue(published, data)
        node = Node(self.libexec, self.load, data, None, *options)
        node.key = (published / "key").read_text()
        return node

    @staticmethod
    def _forget_traces(published: Path) -> None:
        for traces in (published / "store/layers").glob("*/traces"):
            shutil.rmtree(traces)

    def _corral(
        self, published: Path, latency_ms: int, *, whole: bool = False, traces: bool = False, linger: float = 0
    ) -> Run:
        """The burst on a node of its own."""
        with contextlib.ExitStack() as all_of_it:
            disk = all_of_it.enter_context(Disk(self.directory / "corral"))
            remote = Remote(self.load, published / "store", latency_ms, traces=traces)
            all_of_it.callback(remote.close)
            node = self.node(published, disk, f"--store={remote.url}", *(["--whole-layers"] if whole else []))
            all_of_it.callback(node.remove)
            node.start()
            remote.settle()
            drop_caches()
            # Its host's disk is not what is measured: an answer takes the latency.
            remote.warm()
            before, counted = disk.written(), remote.counts()
            begun = time.monotonic()
            asyncio.run(self._tasks(node))
            found = Run(time.monotonic() - begun, 0)
            after = remote.counts()
            found.fetched = after["sent_bytes"] - counted["sent_bytes"]
            found.requests = after["requests"] - counted["requests"]
            found.written = disk.written() - before
            if not whole:
                found.reads = self._reads(node)
            time.sleep(linger)
        return found

    async def _tasks(self, node: Node) -> None:
        places = asyncio.Semaphore(IN_FLIGHT)
        async with corral.AsyncClient(f"http://{node.address}", node.key) as client:
            await asyncio.gather(*(self._task(client, places, image) for image in self.order))

    @staticmethod
    async def _task(client: corral.AsyncClient, places: asyncio.Semaphore, image: Image) -> None:
        async with places:
            try:
                box = await client.sandboxes.create(image.name, limits=LIMITS)
                result = await box.exec(image.task, timeout=TASK_S)
            except corral.CorralError as error:
                raise Failed(f"image {image.name}: {error}") from error
            if not result.ok:
                words = (result.stdout + result.stderr).strip()[-500:]
                raise Failed(f"image {image.name}: its task ended with {result.exit_code}: {words}")

    def _reads(self, node: Node) -> dict[str, tuple[int, int, int]]:
        """What was read of the layers of each stack's images, each layer once, as the server of lazy reads tells."""
        told = {layer["layer"]: layer for layer in _lazy_stats(node)["layers"]}
        layers: dict[str, dict[str, int]] = {stack: {} for stack in STACKS}
        for image in self.images:
            for layer in node.get(f"/v1/images/{image.name}")["layers"]:
                layers[image.stack][layer["digest"].removeprefix("sha256:")] = layer["size_bytes"]
        return {
            stack: (
                sum(told[layer]["fetched_raw_bytes"] for layer in sizes),
                sum(told[layer]["read_bytes"] for layer in sizes),
                sum(sizes.values()),
            )
            for stack, sizes in layers.items()
        }

    def _docker(self) -> Run:
        """`docker load` of all images, and their containers as soon as each image is there."""
        with Disk(self.directory / "docker") as disk:
            engine = Engine(self.load, disk.at / "docker", None)
            try:
                engine.start()
                drop_caches()
                before = disk.written()
                begun = time.monotonic()
                tasks = [(f"{i.name}:burst", i.task) for i in self.order]
                engine.load_and_run(self.corpus.archive(self.images), tasks, IN_FLIGHT)
                found = Run(time.monotonic() - begun, 0)
                found.written = disk.written() - before
            finally:
                engine.remove()
        return found


def _copy_catalogue(one: Path, other: Path) -> None:
    # Some of it may lie in the log beside the file: a copy of the files would have to be of both or neither.
    with contextlib.ExitStack() as both:
        ours, theirs = (both.enter_context(contextlib.closing(sqlite3.connect(at / CATALOGUE))) for at in (one, other))
        ours.backup(theirs)


def _lazy_stats(node: Node) -> dict[str, list[dict[str, Any]]]:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(30)
        link.connect(str(node.directory / "run/lazy.sock"))
        link.sendall(b'{"op":"stats"}\n')
        return dict(json.loads(link.makefile().readline())["ok"])


def _figures(runs: dict[str, list[Run]], count: int, images: int) -> dict[str, Found]:
    def seconds(name: str) -> list[float]:
        return [run.seconds for run in runs[name]]

    def megabytes(name: str) -> list[float]:
        return [run.written / 1e6 for run in runs[name]]

    def middle(values: list[float]) -> float:
        return statistics.median(values)

    main, other = LATENCIES_MS
    what = f"{count} sandboxes over {images} images, {IN_FLIGHT} at a time, cold, store {main} ms away, no traces"
    times = (
        f"{what}; once at {other} ms: {middle(seconds('near lazy')):.1f} s lazily,"
        f" {middle(seconds('near pull')):.1f} s pulled; once with traces: {middle(seconds('traced')):.1f} s"
    )
    fetched = (
        f"fetched {middle([run.fetched / 1e6 for run in runs['lazy']]):.0f} MB lazily,"
        f" {middle([run.fetched / 1e6 for run in runs['pull']]):.0f} MB pulled"
    )
    written = f"MB; pulled {middle(megabytes('pull')):.0f} MB, with traces {middle(megabytes('traced')):.0f} MB"
    found = {
        "lazy_vs_pull_time": Found(
            middle(seconds("pull")) / middle(seconds("lazy")), seconds("lazy"), seconds("pull"), f"{times}; {fetched}"
        ),
        "lazy_vs_docker_time": Found(
            middle(seconds("docker")) / middle(seconds("lazy")),
            seconds("lazy"),
            seconds("docker"),
            f"{what}; docker load of one archive, containers as soon as their image is there",
        ),
        "lazy_vs_docker_writes": Found(
            middle(megabytes("docker")) / middle(megabytes("lazy")), megabytes("lazy"), megabytes("docker"), written
        ),
    }
    for stack in runs["lazy"][0].reads:
        reads = [run.reads[stack] for run in runs["lazy"]]
        parts = [fetched / size for fetched, _, size in reads]
        first, asked, size = reads[0]
        note = (
            f"fetched {first / 1e6:.0f} MB, unpacked, of {size / 1e6:.0f} MB in the layers of"
            f" {images // len(STACKS)} images, each layer once; asked for {asked / 1e6:.0f} MB ({asked / size:.1%});"
            f" DSec: {DSEC[0]:.1%} to {DSEC[1]:.1%} of an image for a task"
        )
        found[f"fraction_read_{stack}"] = Found(middle(parts), parts, note=note)
    return found
