"""The host: what it is, how much memory it has, and taking away what a killed run left on it."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import time
from pathlib import Path

from process import Failed, kill_mentioning, run


def describe() -> str:
    """One line that tells machines apart."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    gib = round(_meminfo()["MemTotal"] / (1 << 20))
    cpu = model.group(1) if model else platform.machine()
    return f"{os.cpu_count()} cores ({cpu}), {gib} GiB, Linux {platform.release()}"


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}


def settled_memory() -> tuple[int, int]:
    """MemAvailable and MemFree in KiB with nothing cached, once what the kernel frees late is freed."""
    last = (0, 0)
    for _ in range(10):
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        time.sleep(1)
        info = _meminfo()
        now = (info["MemAvailable"], info["MemFree"])
        if abs(now[1] - last[1]) < 2048:
            break
        last = now
    return now


def mounts_below(path: Path) -> list[str]:
    """Mount points at or below a path, the latest first."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split(" ")[4].replace("\\040", " ")
        if point == str(path) or point.startswith(f"{path}/"):
            points.append(point)
    return points[::-1]


def cgroups_named(name: str) -> list[Path]:
    """Directories of this name below the cgroups this process is in, in every tree, and at the roots of the trees."""
    found = set()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        tree = controllers.removeprefix("name=") or "unified"
        for root in (Path("/sys/fs/cgroup", tree), Path("/sys/fs/cgroup")):
            for base in (root / path.lstrip("/"), root):
                if (base / name).is_dir():
                    found.add(base / name)
    return sorted(found)


def remove_cgroups(name: str) -> None:
    """Kills what is in the cgroups of this name and removes them."""
    for _ in range(100):
        left = cgroups_named(name)
        if not left:
            return
        for top in left:
            if (top / "cgroup.kill").exists():
                (top / "cgroup.kill").write_text("1")
            for directory, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
        time.sleep(0.1)
    raise Failed(f"cgroups stay: {', '.join(map(str, cgroups_named(name)))}")


def release(directory: Path, cgroup: str | None) -> None:
    """Takes away processes, cgroups and mounts that belong to a directory; its files stay. Goes on past failures."""
    problems = []
    try:
        kill_mentioning(f"{directory}/")
    except Failed as failure:
        problems.append(str(failure))
    try:
        if cgroup:
            remove_cgroups(cgroup)
    except Failed as failure:
        problems.append(str(failure))
    for _ in range(3):
        for point in mounts_below(directory):
            try:
                run(["umount", point], 60)
            except Failed:
                time.sleep(0.5)
    for point in mounts_below(directory):
        try:
            run(["umount", "--lazy", point], 60)
        except Failed as failure:
            problems.append(str(failure))
    if problems:
        raise Failed("; ".join(problems))


def remove_stale(parent: Path) -> None:
    """Removes directories of runs that were killed before they could clean up."""
    for directory in parent.glob("run-*"):
        pid = directory.name.removeprefix("run-")
        if not Path("/proc", pid).exists():
            for depth in ("*", "*/*", "*/*/at/*"):
                for marker in directory.glob(f"{depth}/node-id"):
                    release(directory, f"corral-{marker.read_text().strip()}")
            release(directory, "corral-bench-docker")
            shutil.rmtree(directory, ignore_errors=True)
