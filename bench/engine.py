"""The peer: Debian's Docker engine with a data root and sockets of its own, no network, cgroups beside ours."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import host
from corpus import Archive
from process import Failed, kill_mentioning, run, say, stop

CGROUP = "corral-bench-docker"
# How long loading many images, or a container among others, may take.
LOAD_S = 900


class Engine:
    """A `dockerd` that is started for the bench and ended with it."""

    def __init__(self, load: Path, directory: Path, archive: Path | None) -> None:
        self.load, self.directory, self.archive = load, directory, archive
        self.socket = directory / "docker.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.version = ""

    def start(self) -> None:
        """Installs and starts it, unless it runs, and imports the image where there is one."""
        if self.process is not None:
            return
        if not shutil.which("dockerd"):
            raise Failed("dockerd is missing: run `make setup`, or install the Docker engine")
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self.directory / "dockerd.log", "ab") as log:
            self.process = subprocess.Popen(
                [
                    "dockerd",
                    f"--data-root={self.directory / 'data'}",
                    f"--exec-root={self.directory / 'exec'}",
                    f"--pidfile={self.directory / 'pid'}",
                    f"--host=unix://{self.socket}",
                    f"--cgroup-parent={CGROUP}",
                    "--exec-opt=native.cgroupdriver=cgroupfs",
                    "--bridge=none",
                    "--iptables=false",
                    "--ip-forward=false",
                    "--storage-driver=overlay2",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for _ in range(300):
            if self.process.poll() is not None:
                words = (self.directory / "dockerd.log").read_text().strip().splitlines()[-2:]
                raise Failed(f"dockerd ended: {' / '.join(words)}")
            try:
                self.version = json.loads(self.call("GET", "/version"))["Version"]
                break
            except OSError:
                time.sleep(0.2)
        else:
            raise Failed("dockerd did not answer within 60 s")
        if self.archive is None:
            return
        say(f"dockerd {self.version} runs; importing the image")
        self.call("POST", "/images/create?fromSrc=-&repo=bench&tag=latest", self.archive.read_bytes())

    def call(self, method: str, path: str, body: bytes | None = None, timeout: float = 60) -> bytes:
        """One request; an error status is a failure."""
        connection = _UnixConnection(self.socket, timeout)
        kind = "application/json" if path == "/containers/create" else "application/x-tar"
        try:
            connection.request(method, path, body, {"content-type": kind} if body else {})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status >= 400:
                raise Failed(f"docker {method} {path}: {answer.status}: {content.decode(errors='replace')}")
            return content
        finally:
            connection.close()

    def measure(self, what: str, *numbers: int, timeout: float) -> dict[str, float]:
        """Runs the load program; its numbers."""
        self.start()
        try:
            out = run([self.load, f"--docker={self.socket}", what, *map(str, numbers)], timeout)
        except Failed:
            self._remove_containers()
            raise
        return dict(json.loads(out))

    def load_and_run(self, archive: Archive, tasks: list[tuple[str, list[str]]], in_flight: int) -> None:
        """Loads images from what `docker save` wrote, and runs tasks in them, each once its image is there."""
        waiting = list(tasks)
        running: list[Future[None]] = []
        with ThreadPoolExecutor(in_flight) as pool:
            for image in self._loaded(archive):
                running += [pool.submit(self._run_task, *task) for task in waiting if task[0] == image]
                waiting = [task for task in waiting if task[0] != image]
        for done in running:
            done.result()
        if waiting:
            raise Failed(f"docker load did not bring {waiting[0][0]}")

    def _loaded(self, archive: Archive) -> Iterator[str]:
        """Loads an archive; names of images as they are there."""
        connection = _UnixConnection(self.socket, LOAD_S)
        try:
            headers = {"content-type": "application/x-tar", "content-length": str(len(archive))}
            connection.request("POST", "/images/load", iter(archive), headers)
            for line in iter(connection.getresponse().readline, b""):
                told = json.loads(line)
                if "error" in told or "message" in told:
                    raise Failed(f"docker load: {told.get('error') or told['message']}")
                if "Loaded image: " in told.get("stream", ""):
                    yield told["stream"].partition("Loaded image: ")[2].strip()
        finally:
            connection.close()

    def _run_task(self, image: str, command: list[str]) -> None:
        """What `docker run` does, without its own process."""
        spec = {"Image": image, "Cmd": command, "HostConfig": {"NetworkMode": "none"}}
        made = json.loads(self.call("POST", "/containers/create", json.dumps(spec).encode(), LOAD_S))["Id"]
        self.call("POST", f"/containers/{made}/start", None, LOAD_S)
        status = json.loads(self.call("POST", f"/containers/{made}/wait", None, LOAD_S))["StatusCode"]
        if status != 0:
            words = self.call("GET", f"/containers/{made}/logs?stdout=true&stderr=true").decode(errors="replace")
            raise Failed(f"image {image}: its task ended with {status} in Docker: {words.strip()[-500:]}")

    def _remove_containers(self) -> None:
        for container in json.loads(self.call("GET", "/containers/json?all=true")):
            self.call("DELETE", f"/containers/{container['Id']}?force=true")

    def remove(self) -> None:
        """Ends it with its containers, mounts and cgroups, and removes its data."""
        if self.process is None:
            return
        try:
            if self.process.poll() is None:
                self._remove_containers()
        except (Failed, OSError) as failure:
            say(f"containers could not be removed by the engine: {failure}")
        finally:
            stop(self.process, 30)
            self.process = None
            kill_mentioning(f"{self.directory}/")
            host.release(self.directory, CGROUP)
            shutil.rmtree(self.directory, ignore_errors=True)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))
