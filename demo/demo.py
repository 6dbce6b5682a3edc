"""A hundred sandboxes from one environment, each running a real project's test suite.

Usage: demo.py [--sandboxes N] [--json FILE]. Needs root: it starts a node of its own and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import corral
import ingredients
import node

T = TypeVar("T")
LIMITS = corral.Limits(memory_mib=512, cpus=1.0, pids=128, disk_mib=256)
SUITE_SECONDS = 900


@dataclass
class Phase:
    """What one step took, for each sandbox and in all."""

    name: str
    times: list[float] = field(default_factory=list)
    wall: float = 0.0

    def row(self) -> str:
        ordered = sorted(self.times) or [0.0]
        at = [ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.99, 1.0)]
        cells = "".join(f"{1000 * seconds:>10.0f} ms" for seconds in at)
        return f"    {self.name:<18}{cells}{self.wall:>12.1f} s"


async def timed(phase: Phase, work: Awaitable[T]) -> T:
    began = time.perf_counter()
    try:
        return await work
    finally:
        phase.times.append(time.perf_counter() - began)


async def tell(phase: Phase, count: int) -> None:
    """Says how many are done: in place on a terminal, else with a line now and then."""
    began, terminal = time.perf_counter(), sys.stdout.isatty()
    try:
        while True:
            await asyncio.sleep(0.5 if terminal else 10)
            line = f"    {len(phase.times)} of {count} done, {time.perf_counter() - began:.0f} s"
            print(f"\r{line}" if terminal else line, end="" if terminal else "\n", flush=True)
    finally:
        if terminal:
            print("\r\033[K", end="", flush=True)


async def all_at_once(phase: Phase, jobs: list[Callable[[], Awaitable[T]]]) -> list[T | BaseException]:
    began = time.perf_counter()
    telling = asyncio.create_task(tell(phase, len(jobs)))
    results = await asyncio.gather(*(timed(phase, job()) for job in jobs), return_exceptions=True)
    phase.wall = time.perf_counter() - began
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    return results


def free_memory() -> tuple[int, int]:
    """MemAvailable and MemFree in bytes, once the kernel has freed what it frees late, without the page cache: its fall
    and rise would drown what sandboxes take."""
    last = (0, 0)
    for _ in range(10):
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        time.sleep(0.5)
        text = Path("/proc/meminfo").read_text()
        available, free = (re.search(rf"^{name}:\s+(\d+) kB", text, re.M) for name in ("MemAvailable", "MemFree"))
        now = (int(available[1]) * 1024 if available else 0, int(free[1]) * 1024 if free else 0)
        if abs(now[1] - last[1]) < 2 << 20:
            break
        last = now
    return now


def mib(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"


@dataclass
class Ingredients:
    """Local files that the environment is made of."""

    base: Path
    workspace: Path
    toolkit: Path


async def compose(client: corral.AsyncClient, local: Ingredients) -> tuple[str, int, int]:
    """Imports base, workspace and toolkit; returns the environment's name, its stored bytes and its layers' number."""
    base = await client.images.import_file(local.base, "demo/base", kind="rootfs")
    workspace = await client.layers.build(local.workspace, kind="workspace", at="/work")
    toolkit = await client.layers.build(local.toolkit, kind="toolkit", at="/opt/toolkit")
    spec = corral.EnvironmentSpec(
        base="demo/base",
        workspaces=(workspace.digest,),
        toolkits=(toolkit.digest,),
        env={"PYTHONPATH": "/opt/toolkit:/work/src", "PYTHONDONTWRITEBYTECODE": "1"},
        workdir="/work",
    )
    await client.environments.put("demo", spec)
    for name, size in [("base", base.size_bytes), ("workspace", workspace.size_bytes), ("toolkit", toolkit.size_bytes)]:
        print(f"    {name:<10} {mib(size):>12}")
    total = base.size_bytes + workspace.size_bytes + toolkit.size_bytes
    return "demo", total, len(base.layers) + 2


def passed_tests(result: corral.ExecResult) -> int:
    found = re.search(r"(\d+) passed", result.stdout)
    return int(found[1]) if result.ok and found else 0


async def run(client: corral.AsyncClient, local: Ingredients, count: int) -> tuple[bool, dict[str, object]]:
    print("\n==> composing the environment")
    environment, stored, layers = await compose(client, local)

    create, suite, remove = Phase("create"), Phase("test suite"), Phase("remove")
    print(f"\n==> starting {count} sandboxes at once")
    before = await asyncio.to_thread(free_memory)
    make = lambda: client.sandboxes.create(environment, limits=LIMITS, max_ttl=3600)  # noqa: E731
    made = await all_at_once(create, [make] * count)
    after = await asyncio.to_thread(free_memory)
    sandboxes = [s for s in made if isinstance(s, corral.AsyncSandbox)]
    problems = [str(s) for s in made if isinstance(s, BaseException)]

    print(f"==> running the suite of {ingredients.PROJECT} {ingredients.VERSION} in each of {len(sandboxes)}")
    print(f"    all at once on {os.cpu_count()} cores: they end close together, after a while")
    command = ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]

    def suite_of(sandbox: corral.AsyncSandbox) -> Callable[[], Awaitable[corral.ExecResult]]:
        return lambda: sandbox.exec(command, timeout=SUITE_SECONDS, step_key="suite")

    results = await all_at_once(suite, [suite_of(s) for s in sandboxes])

    print("==> removing them")
    removed = await all_at_once(remove, [s.delete for s in sandboxes])
    problems += [f"removing: {r}" for r in removed if isinstance(r, BaseException)]

    counts = []
    for sandbox, result in zip(sandboxes, results, strict=True):
        if isinstance(result, BaseException):
            problems.append(f"{sandbox.id}: {result}")
        elif passed_tests(result) == 0:
            problems.append(f"{sandbox.id}: exit {result.exit_code}: {result.stdout[-300:]} {result.stderr[-300:]}")
        else:
            counts.append(passed_tests(result))

    good = len(counts) == count and len(set(counts)) == 1 and not problems
    print(f"\n    {'':<18}{'p50':>13}{'p99':>13}{'max':>13}{'all':>14}")
    for phase in (create, suite, remove):
        print(phase.row())
    each = max(0, *(b - a for b, a in zip(before, after, strict=True))) / max(1, len(sandboxes))
    print(f"\n    suites passed      {len(counts)} of {count}, {sum(counts):,} tests in all")
    told = f"{mib(each)} for each sandbox (fall of MemAvailable or MemFree)"
    print(f"    host memory        {told if each else 'not measurable: others gave back more than these took'}")
    print(f"    shared layers      {layers} layers, stored once: {mib(stored)}; copied for each: {mib(stored * count)}")
    for problem in problems[:5]:
        print("    failed:", problem, file=sys.stderr)
    report: dict[str, object] = {
        phase.name.replace(" ", "_"): {"times_s": sorted(phase.times), "wall_s": phase.wall}
        for phase in (create, suite, remove)
    }
    report |= {"sandboxes": count, "passed": len(counts), "tests": sum(counts)}
    report |= {"memory_each_bytes": each, "stored_bytes": stored, "layers": layers}
    return good, report


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandboxes", type=int, default=100, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    args = parser.parse_args()
    print("==> ingredients (fetched once)")
    local = Ingredients(ingredients.base(), ingredients.workspace(), ingredients.toolkit())
    print("==> starting a node")
    with node.running() as (url, key):
        async with corral.AsyncClient(url, key) as client:
            good, report = await run(client, local, args.sandboxes)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print("\nall suites passed" if good else "\nFAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
