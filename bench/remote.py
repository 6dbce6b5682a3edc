"""A shared store that is far away: a directory store behind S3's protocol, each request answered late."""

from __future__ import annotations

import json
import select
import subprocess
import time
from pathlib import Path

from process import Failed, kill_group

BUCKET = "layers"
PIECE = 1 << 20


class Remote:
    """A load program that serves the store, so that its work is not in the bench's own process.

    Without traces these are not shown and not kept, so that a cold run stays cold.
    """

    def __init__(self, load: Path, root: Path, latency_ms: int, *, traces: bool = False) -> None:
        self.root = root
        words: list[str | Path] = [load, "remote", root, str(latency_ms), *(["--traces"] if traces else [])]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        port = int(self._line())
        self.url = (
            f"s3://{BUCKET}?endpoint=http://127.0.0.1:{port}&path_style=true&allow_http=true&credentials=anonymous"
        )

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], 30)[0]:
            raise Failed("the remote store does not answer")
        line = self.process.stdout.readline()
        if not line:
            raise Failed("the remote store ended")
        return line

    def counts(self) -> dict[str, int]:
        """Requests and bytes so far."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        return dict(json.loads(self._line()))

    def settle(self) -> None:
        """Waits until nobody asks any more: a node that starts learns what is published."""
        for _ in range(120):
            before = self.counts()
            time.sleep(1)
            if self.counts() == before:
                return
        raise Failed("requests of the remote store do not end")

    def warm(self) -> None:
        """Has all that is stored in the page cache."""
        for path in self.root.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    while file.read(PIECE):
                        pass

    def close(self) -> None:
        """Ends it."""
        kill_group(self.process)
