"""A node and gateway of the demo's own, gone at its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY_SECONDS = 60
STOP_SECONDS = 120


@contextmanager
def running() -> Iterator[tuple[str, str]]:
    """Starts ``corral up --ephemeral`` on a free port and yields its URL and a key."""
    program = os.environ.get("CORRAL_BIN", "target/libexec/corral")
    with tempfile.TemporaryDirectory(prefix="corral-demo-") as scratch:
        log = Path(scratch, "log")
        environment = os.environ | {"CORRAL_CREDENTIALS": str(Path(scratch, "credentials.json"))}
        with log.open("wb") as errors:
            node = subprocess.Popen(
                [program, "--json", "up", "--ephemeral", "--listen", "127.0.0.1:0"],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        try:
            assert node.stdout is not None
            line = node.stdout.readline()
            if not line:
                raise RuntimeError(f"corral up did not start:\n{log.read_text()}")
            ready = json.loads(line)
            yield ready["url"], ready["key"]
        finally:
            node.send_signal(signal.SIGTERM)
            try:
                code = node.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                node.kill()
                code = node.wait()
            if code != 0:
                print(f"corral up ended with {code}:\n{log.read_text()[-3000:]}")
