#!/usr/bin/env python3
"""Measures what SPEC.md promises in numbers, and writes bench/results.jsonl and the table in README.md.

Arms of a comparison run in turns in one run. Everything the bench starts is its own and is taken away at its end, also
after a failure or Ctrl-C; what a killed run left is taken away by the next. Needs root.

CORRAL_LIBEXEC  directory of corral, corral-keeper and the rest; target/libexec where absent
CORRAL_LOAD     the load program; built from bench/load where absent
BARELAUNCH      the bare launcher; built from its sources where absent
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import host
import results
import rootfs
from bare import Bare
from burst import Burst
from engine import Engine
from layers import Layers
from node import Node
from process import Failed, run, say
from results import Found
from tasks import STACKS

REPOSITORY = Path(__file__).resolve().parent.parent
TARGET = REPOSITORY / "target/bench"


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    samples: int = 5
    creates: int = 1000
    docker_creates: int = 24
    docker_execs: int = 4
    latencies: int = 40
    execs: tuple[int, int] = (200, 2000)
    live: int = 3200
    most: int = 8000
    turns: int = 3
    images: int = 20


QUICK = Sizes(2, 64, 8, 1, 5, (20, 200), 100, 200, 1, 5)
IN_FLIGHT = 32
DOCKER_IN_FLIGHT = (1, 4, 8, 16)


class Skipped(Exception):
    """A figure that cannot be measured here, and why."""


class Bench:
    """The arms and the measurements on them."""

    def __init__(self, directory: Path, sizes: Sizes) -> None:
        self.sizes = sizes
        libexec = Path(os.environ.get("CORRAL_LIBEXEC", REPOSITORY / "target/libexec")).resolve()
        if not (libexec / "corral").exists():
            raise Failed(f"{libexec}/corral is missing: run `make build`")
        archive = directory / "rootfs.tar"
        rootfs.build(directory / "rootfs", archive)
        load = self._load()
        self.node = Node(libexec, load, directory / "node", archive, f"--max-live={2 * sizes.most}")
        self.layers = Layers(libexec, load, directory / "layers", archive, sizes.samples)
        self.engine = Engine(load, directory / "docker", archive)
        self.burst = Burst(libexec, load, directory / "burst", sizes.turns, sizes.images)
        self.bare = Bare(REPOSITORY, TARGET / "barelaunch", directory / "rootfs", directory / "bare")

    @staticmethod
    def _load() -> Path:
        given = os.environ.get("CORRAL_LOAD")
        if given:
            return Path(given)
        say("building the load program")
        run(["cargo", "build", "--quiet", "--release", "-p", "corral-load"], 1800, cwd=REPOSITORY)
        target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
        return target / "release/corral-load"

    def close(self) -> None:
        """Takes everything away."""
        with contextlib.ExitStack() as all_of_it:
            for arm in (self.engine, self.layers, self.node):
                all_of_it.callback(arm.remove)

    def _create_rate(self) -> float:
        figures = self.node.measure("create", self.sizes.creates, IN_FLIGHT, timeout=300)
        return figures["per_second"]

    def against_bare(self) -> dict[str, Found]:
        """Creates a second, ours and the bare kernel's."""
        if not self.bare.is_there():
            raise Skipped("there is no barelaunch beside this repository")
        ours, bare = [], []
        for turn in self._turns("creates against the bare kernel"):
            bare.append(self.bare.rate(self.sizes.creates))
            ours.append(self._create_rate())
            say(f"  {turn}: bare {bare[-1]:.0f}/s, ours {ours[-1]:.0f}/s")
        return {"create_rate_vs_barelaunch": _ratio(ours, bare)}

    def against_docker_creates(self) -> dict[str, Found]:
        """Creates a second, ours and the best of Docker's."""
        ours, peer, best = [], [], []
        self.engine.start()
        for turn in self._turns("creates against Docker"):
            rates = {
                n: self.engine.measure("create", self.sizes.docker_creates, n, timeout=300)["per_second"]
                for n in DOCKER_IN_FLIGHT
            }
            best.append(max(rates, key=lambda n: rates[n]))
            peer.append(rates[best[-1]])
            ours.append(self._create_rate())
            say(f"  {turn}: Docker {peer[-1]:.1f}/s at {best[-1]} in flight, ours {ours[-1]:.0f}/s")
        found = _ratio(ours, peer)
        found.note = f"dockerd {self.engine.version}, best in flight by turn: {', '.join(map(str, best))}"
        return {"create_rate_vs_docker": found}

    def against_docker_execs(self) -> dict[str, Found]:
        """How long `true` takes in a live sandbox, ours and Docker's."""
        ours, peer = [], []
        self.engine.start()
        for turn in self._turns("exec against Docker"):
            peer.append(self.engine.measure("latency", self.sizes.docker_execs, timeout=300)["exec_p50_ms"])
            ours.append(self.node.measure("latency", self.sizes.latencies, timeout=300)["exec_p50_ms"])
            say(f"  {turn}: Docker {peer[-1]:.1f} ms, ours {ours[-1]:.2f} ms")
        return {"exec_vs_docker": Found(statistics.median(peer) / statistics.median(ours), ours, peer)}

    def latency(self) -> dict[str, Found]:
        """One request at a time."""
        names = {
            "create_p50_ms": "create_p50_ms",
            "first_command_p50_ms": "first_command_p50_ms",
            "exec_true_p50_ms": "exec_p50_ms",
        }
        samples: dict[str, list[float]] = {name: [] for name in names}
        for turn in self._turns("latencies"):
            figures = self.node.measure("latency", self.sizes.latencies, timeout=300)
            for name, key in names.items():
                samples[name].append(figures[key])
            say(f"  {turn}: " + ", ".join(f"{name} {samples[name][-1]:.2f}" for name in names))
        return {name: Found(statistics.median(values), values) for name, values in samples.items()}

    def exec_rate(self) -> dict[str, Found]:
        """Commands a second."""
        rates = []
        for turn in self._turns("commands"):
            rates.append(self.node.measure("exec", *self.sizes.execs, IN_FLIGHT, timeout=300)["per_second"])
            say(f"  {turn}: {rates[-1]:.0f}/s")
        return {"execs_per_s": Found(statistics.median(rates), rates)}

    def live(self) -> dict[str, Found]:
        """Many at once: memory of each, time to create and to remove. Daemons start and end with each turn."""
        count = self.sizes.live
        kib, create, remove = [], [], []
        self.engine.remove()
        self.node.start()
        for turn in self._turns(f"{count} live"):
            self.node.stop()
            before = host.settled_memory()
            held = self.node.hold(count, IN_FLIGHT, 300)
            try:
                after = host.settled_memory()
                removal = held.remove(300)
            finally:
                held.close()
            kib.append(max(b - a for b, a in zip(before, after, strict=True)) / count)
            create.append(held.figures["create_seconds"])
            remove.append(removal["remove_seconds"])
            say(f"  {turn}: {kib[-1]:.0f} KiB each, created in {create[-1]:.1f} s, removed in {remove[-1]:.1f} s")
        note = f"{count} sandboxes; larger of the drops in MemAvailable and MemFree, daemons included"
        return {
            "live_3200_kib_each": Found(statistics.median(kib), kib, note=note),
            "live_3200_create_s": Found(statistics.median(create), create),
            "live_3200_remove_s": Found(statistics.median(remove), remove),
        }

    def most(self) -> dict[str, Found]:
        """How many can be live at once, up to a number; what gave way first. Daemons start and end with each turn."""
        count = self.sizes.most
        self.engine.remove()
        self.node.start()
        reached, notes = [], []
        for turn in self._turns(f"{count} live"):
            self.node.stop()
            before = host.settled_memory()
            try:
                held = self.node.hold(count, IN_FLIGHT, 580)
                after = host.settled_memory()
                held.close()
                each = max(b - a for b, a in zip(before, after, strict=True)) / count
                seconds = held.figures["create_seconds"]
                reached.append(count)
                took = f"created in {seconds:.0f} s, all answered a command, {each:.0f} KiB each"
                notes.append(f"nothing gave way: {took}")
            except Failed as failure:
                reached.append(self.node.live())
                notes.append(f"gave way first: {failure}")
            finally:
                # Quicker than removing them one by one.
                self.node.stop()
            say(f"  {turn}: {reached[-1]}: {notes[-1]}")
        note = f"the least: {notes[reached.index(min(reached))]}"
        return {"live_max": Found(statistics.median(reached), [*map(float, reached)], note=note)}

    def _turns(self, what: str) -> list[str]:
        say(what)
        return [f"{n} of {self.sizes.samples}" for n in range(1, self.sizes.samples + 1)]

    def changes(self) -> dict[str, Found]:
        """Packing, forking and taking back what a sandbox wrote."""
        return self.layers.changes()

    def reads(self) -> dict[str, Found]:
        """Reads of layers against a plain mount."""
        return self.layers.reads()

    def dedupe(self) -> dict[str, Found]:
        """What a second image on the same base adds to a store."""
        return self.layers.dedupe()

    def bursts(self) -> dict[str, Found]:
        """A burst over many images on a cold node, against pulling them whole and against Docker."""
        self.engine.remove()
        self.node.stop()
        return self.burst.measure()


def _ratio(ours: list[float], baseline: list[float]) -> Found:
    return Found(statistics.median(ours) / statistics.median(baseline), ours, baseline)


BURST = (
    "lazy_vs_pull_time",
    "lazy_vs_docker_time",
    "lazy_vs_docker_writes",
    *(f"fraction_read_{stack}" for stack in STACKS),
)
GROUPS: list[tuple[Callable[[Bench], dict[str, Found]], tuple[str, ...]]] = [
    (Bench.latency, ("create_p50_ms", "first_command_p50_ms", "exec_true_p50_ms")),
    (Bench.exec_rate, ("execs_per_s",)),
    (Bench.against_bare, ("create_rate_vs_barelaunch",)),
    (Bench.against_docker_creates, ("create_rate_vs_docker",)),
    (Bench.against_docker_execs, ("exec_vs_docker",)),
    (Bench.live, ("live_3200_kib_each", "live_3200_create_s", "live_3200_remove_s")),
    (Bench.most, ("live_max",)),
    (Bench.changes, ("pack_diff_ms", "fork_first_command_p50_ms", "rollback_p50_ms")),
    (Bench.reads, ("warm_seq_vs_erofs", "warm_random_vs_erofs", "lazy_warm_vs_erofs")),
    (Bench.dedupe, ("dedupe_second_image_ratio",)),
    (Bench.bursts, BURST),
]


def measure(bench: Bench, wanted: set[str], keep: Callable[[dict[str, Found]], None]) -> list[str]:
    """Measures what is wanted, hands each group over as it is done, counts what was skipped, returns what failed."""
    failed, skipped = [], []
    for group, ids in GROUPS:
        names = [name for name in ids if name in wanted]
        if not names:
            continue
        try:
            found = group(bench)
            keep({name: found[name] for name in names})
        except Skipped as reason:
            skipped += [f"{name} ({reason})" for name in names]
        except (Failed, OSError, KeyError, ValueError) as failure:
            say(f"failed: {failure}")
            failed += names
    print(f"{len(skipped)} figures skipped{': ' if skipped else ''}{', '.join(skipped)}")
    print(f"{len(failed)} figures failed{': ' if failed else ''}{', '.join(failed)}")
    return failed


def main() -> int:
    """The command line."""
    known = [figure.id for figure in results.FIGURES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to try the bench; writes to target/bench only"
    )
    parser.add_argument("--only", metavar="ID,…", help=f"some of: {', '.join(known)}")
    arguments = parser.parse_args()
    wanted = set(arguments.only.split(",")) if arguments.only else set(known)
    if wanted - set(known):
        parser.error(f"unknown figures: {', '.join(sorted(wanted - set(known)))}")
    if os.geteuid() != 0:
        parser.error("the bench starts a node: run as root")

    TARGET.mkdir(parents=True, exist_ok=True)
    path = TARGET / "quick.jsonl" if arguments.quick else REPOSITORY / "bench/results.jsonl"
    commit, machine = _commit(), host.describe()

    def keep(found: dict[str, Found]) -> None:
        rows = results.write(path, found, commit, machine)
        if not arguments.quick:
            results.update_readme(REPOSITORY / "README.md", rows)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    host.remove_stale(TARGET)
    directory = TARGET / f"run-{os.getpid()}"
    directory.mkdir()
    bench = None
    try:
        bench = Bench(directory, QUICK if arguments.quick else Sizes())
        failed = measure(bench, wanted, keep)
    except Failed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        say("cleaning up")
        try:
            if bench is not None:
                bench.close()
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    print(results.table(results.read(path)), end="")
    print(f"written to {path.relative_to(REPOSITORY)}")
    return 1 if failed else 0


def _commit() -> str:
    short = run(["git", "-C", REPOSITORY, "rev-parse", "--short", "HEAD"], 10).strip()
    changed = run(
        ["git", "-C", REPOSITORY, "status", "--porcelain", "--untracked-files=no", "--", "crates", "Cargo.lock"], 10
    )
    return f"{short}+changes" if changed.strip() else short


if __name__ == "__main__":
    sys.exit(main())
