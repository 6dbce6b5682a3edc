"""The arm that is measured: a `corral up` of the bench's own, and the load on it."""

from __future__ import annotations

import http.client
import json
import os
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import corral

import host
from process import Failed, kill_group, run, say, stop


class Node:
    """A gateway and node with a data directory of its own."""

    def __init__(self, libexec: Path, load: Path, directory: Path, archive: Path | None, *options: str) -> None:
        self.libexec, self.load, self.directory, self.archive = libexec, load, directory, archive
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None
        self.address, self.key, self.node_id = "", "", ""
        self.imported = False

    def start(self) -> None:
        """Starts it, unless it runs, and imports the image the first time, where there is one."""
        if self.process is not None:
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        with open(self.directory.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen(
                [
                    self.libexec / "corral",
                    "--json",
                    "up",
                    f"--data-dir={self.directory}",
                    f"--listen={self.address}",
                    f"--credentials={self.directory.with_suffix('.json')}",
                    *self.options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "CORRAL_LIBEXEC": str(self.libexec)},
                start_new_session=True,
            )
        ready = json.loads(self._first_line(self.process, 120))
        self.node_id = ready["node_id"]
        self.key = ready["key"] or self.key
        if self.archive is not None and not self.imported:
            say("importing the image into Corral")
            self.import_image("bench", self.archive)
            self.imported = True

    def import_image(self, name: str, archive: Path) -> None:
        """Imports a tar of a root file system."""
        with open(archive, "rb") as body:
            self.import_stream(name, "rootfs", body, archive.stat().st_size)

    def import_stream(self, name: str, kind: str, body: Iterable[bytes], length: int) -> None:
        """Imports a tar of a root file system (`rootfs`), or what `docker save` writes (`archive`)."""
        connection = http.client.HTTPConnection(self.address, timeout=600)
        try:
            headers = {
                "authorization": f"Bearer {self.key}",
                "content-type": "application/x-tar",
                "content-length": str(length),
            }
            connection.request("PUT", f"/v1/images/{name}?kind={kind}", body, headers)
            answer = connection.getresponse()
            for line in iter(answer.readline, b""):
                # An error status brings a problem document, which has no event.
                event = json.loads(line).get("event", "failed")
                if event == "imported":
                    return
                if event == "failed":
                    raise Failed(f"the import failed: {line.decode(errors='replace').strip()}")
            raise Failed("the import broke off")
        finally:
            connection.close()

    def _first_line(self, process: subprocess.Popen[bytes], timeout: float) -> bytes:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], timeout)[0]:
            raise Failed(f"corral up was not ready within {timeout:g} s")
        line = process.stdout.readline()
        if not line:
            words = self.directory.with_suffix(".log").read_text().strip().splitlines()[-3:]
            raise Failed(f"corral up ended: {' / '.join(words)}")
        return line

    def get(self, path: str) -> Any:
        """The answer to one request; an error status is a failure."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        try:
            connection.request("GET", path, headers={"authorization": f"Bearer {self.key}"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status >= 400:
                raise Failed(f"GET {path}: {answer.status}: {content.decode(errors='replace')}")
            return json.loads(content)
        finally:
            connection.close()

    def client(self) -> corral.Client:
        """The Python client, on this gateway."""
        return corral.Client(f"http://{self.address}", self.key)

    def live(self) -> int:
        """Sandboxes that are not ended, as the node counts them."""
        return int(self.get("/v1/nodes")["nodes"][0]["live"])

    def measure(self, what: str, *numbers: int, timeout: float) -> dict[str, float]:
        """Runs the load program; its numbers."""
        self.start()
        return dict(json.loads(run(self._command(what, *numbers), timeout, self._environment())))

    def _command(self, what: str, *numbers: int) -> list[str | Path]:
        return [self.load, f"--gateway={self.address}", what, *map(str, numbers)]

    def _environment(self) -> dict[str, str]:
        return {"CORRAL_API_KEY": self.key}

    def hold(self, count: int, in_flight: int, timeout: float) -> Held:
        """Creates so many sandboxes, runs a command in each and keeps them."""
        self.start()
        process = subprocess.Popen(
            self._command("live", count, in_flight),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "RUST_BACKTRACE": "0", **self._environment()},
            start_new_session=True,
        )
        held = Held(process)
        try:
            held.figures = held.line(timeout)
        except BaseException:
            kill_group(process)
            raise
        return held

    def stop(self) -> None:
        """Ends it with its keepers, sandboxes, mounts and cgroups; the data directory stays for the next start."""
        if self.process is None:
            return
        stop(self.process, 30)
        self.process = None
        host.release(self.directory, f"corral-{self.node_id}" if self.node_id else None)

    def remove(self) -> None:
        """Ends it and removes its data."""
        try:
            self.stop()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)


class Held:
    """Sandboxes that a load program keeps."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.figures: dict[str, float] = {}

    def line(self, timeout: float) -> dict[str, float]:
        """The next line of the load program."""
        out, err = self.process.stdout, self.process.stderr
        assert out is not None
        assert err is not None
        until = time.monotonic() + timeout
        if not select.select([out], [], [], max(0.0, until - time.monotonic()))[0]:
            raise Failed(f"the load did not go on within {timeout:g} s")
        text = out.readline()
        if not text:
            words = err.read().decode(errors="replace").split()
            raise Failed(f"the load failed: {' '.join(words)}")
        return dict(json.loads(text))

    def remove(self, timeout: float) -> dict[str, float]:
        """Lets the load program remove them; its numbers."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()
            return self.line(timeout)
        finally:
            kill_group(self.process)

    def close(self) -> None:
        """Ends the load program; the sandboxes stay."""
        kill_group(self.process)
