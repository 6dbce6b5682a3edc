"""Programs the bench runs: each in a process group of its own, with an end, and never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class Failed(Exception):
    """A program failed or did not end in time; the text says which and how."""


def say(text: str) -> None:
    """Tells what is going on."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a program and everything of its group, and reaps it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(args: list[str | Path], timeout: float, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Runs a program to its end and returns what it printed. Raises `Failed` when it fails or takes too long."""
    process = subprocess.Popen(
        args,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "RUST_BACKTRACE": "0", **(env or {})},
        cwd=cwd,
        start_new_session=True,
    )
    name = Path(args[0]).name
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise Failed(f"{name} did not end within {timeout:g} s") from None
    finally:
        kill_group(process)
    if process.returncode != 0:
        words = err.decode(errors="replace").strip().splitlines()[-4:]
        raise Failed(f"{name} ended with {process.returncode}: {' / '.join(word.strip() for word in words)}")
    return out.decode()


def stop(process: subprocess.Popen[bytes], patience: float) -> None:
    """Ends a program as an operator would; kills its group when it does not go."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            print(f"{process.args!r} does not end: killed", file=sys.stderr)
    kill_group(process)


def kill_mentioning(text: str) -> None:
    """Kills every process that has `text` in its command line: keepers and shims, which leave their group."""
    for _ in range(50):
        found = mentioning(text)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    raise Failed(f"processes of {text} do not die")


def mentioning(text: str) -> list[int]:
    """Processes that have `text` in their command line, but for this one."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _mentions(pid, text)]


def _mentions(pid: int, text: str) -> bool:
    if pid == os.getpid():
        return False
    try:
        return text.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
