"""The limit: `barelaunch`, which starts isolated processes with no platform in between.

It is kept beside this repository.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from process import Failed, kill_group, run, say

ATTEMPTS = 10
# Seconds without a new sandbox, or one fewer at the end, after which it surely hangs.
STILL_S = 8


class Bare:
    """The program and the directory that it works in."""

    def __init__(self, repository: Path, target: Path, root: Path, directory: Path) -> None:
        self.source = repository.parent / "shared/bench/barelaunch"
        self.target, self.root, self.directory = target, root, directory
        given = os.environ.get("BARELAUNCH")
        self.program = Path(given) if given else None

    def is_there(self) -> bool:
        """Whether it can be had."""
        return self.program is not None or (self.source / "Cargo.toml").exists()

    def rate(self, count: int) -> float:
        """Starts a second, with two threads."""
        if self.program is None:
            say("building barelaunch")
            # Its directory may be read-only, and has no lock file.
            copy = self.target / "source"
            shutil.copytree(self.source, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("target"))
            manifest = copy / "Cargo.toml"
            run(
                [
                    "cargo",
                    "build",
                    "--quiet",
                    "--release",
                    "--manifest-path",
                    manifest,
                    "--target-dir",
                    self.target,
                ],
                900,
            )
            self.program = self.target / "release/barelaunch"
        for attempt in range(1, ATTEMPTS + 1):
            self.directory.mkdir(parents=True)
            try:
                return float(json.loads(self._run(self.program, count))["per_second"])
            except Failed as failure:
                say(f"  attempt {attempt} of {ATTEMPTS}: {failure}")
            finally:
                shutil.rmtree(self.directory, ignore_errors=True)
        raise Failed(f"barelaunch failed {ATTEMPTS} times")

    def _run(self, program: Path, count: int) -> str:
        """Runs it once; gives up when it makes nothing new for a while.

        A child that is cloned while the C library starts the other thread inherits a held lock and hangs, and its
        parent with it.
        """
        process = subprocess.Popen(
            [program, self.root, str(count), "2"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(self.directory)},
            start_new_session=True,
        )
        made, since = -1, time.monotonic()
        try:
            while True:
                try:
                    out, err = process.communicate(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    now = sum(len(os.listdir(below)) for below in self.directory.iterdir())
                    if now != made:
                        made, since = now, time.monotonic()
                    elif time.monotonic() - since > STILL_S:
                        raise Failed(f"barelaunch hangs after {made} of {count}") from None
        finally:
            kill_group(process)
        if process.returncode != 0:
            raise Failed(f"barelaunch ended with {process.returncode}: {err.decode(errors='replace').strip()}")
        return out.decode()
