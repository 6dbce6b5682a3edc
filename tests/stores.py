"""Nodes before a shared store of layers, for the tests of what they do with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import corral
from conftest import SMALL
from support import Server, processes, status_of, with_busybox

# Forty files of half a megabyte that nothing else has.
BIG = "mkdir /big; n=0; while [ $n -lt 40 ]; do head -c 500000 /dev/urandom > /big/$n; n=$((n+1)); done; sync"


def usage_of(server: Server, digest: str) -> dict[str, Any]:
    listed = json.loads(server.cli("--json", "layer", "du").stdout)["layers"]
    return dict(next(layer for layer in listed if layer["digest"] == digest))


@contextmanager
def node(scratch: Path, *options: str) -> Iterator[tuple[Server, corral.Client, Path]]:
    store = scratch / "store"
    store.mkdir()
    server = Server(False, "--store", f"file://{store}", *options)
    with with_busybox(server, scratch) as client:
        yield server, client, store


def objects(store: Path) -> set[str]:
    found = (path.relative_to(store) for path in store.rglob("*") if path.is_file())
    return {str(path) for path in found if not any(part.startswith(".") for part in path.parts)}


def make_big(client: corral.Client, name: str = "big") -> tuple[str, str]:
    """Makes an image of 20 MB that nothing else has. Returns the digests of its files and that of its own layer."""
    with client.sandboxes.create("bb", limits=SMALL) as box:
        box.exec(BIG, check=True)
        sums = box.exec("cd /big; md5sum *", check=True).stdout
        return sums, box.snapshot(name).layers[-1].digest


def take_down(server: Server) -> None:
    """Ends what an ended `corral up` has left, and makes sure that nothing stays on the host."""
    down = server.cli("down", "--data-dir", str(server.data))
    assert down.returncode == 0, down.stderr
    left = server.remains()
    assert not any(left.values()), left


def lose_layers(server: Server) -> None:
    """What a node is that was just added: it knows of images, and has no layer."""
    assert server.stop() == 0
    take_down(server)
    shutil.rmtree(server.data / "layers")
    server.start()


def lazy_servers(server: Server) -> list[int]:
    """The servers of a node: children of the holder that names its directory."""
    programs = [(pid, words) for pid, words in processes() if words[0].endswith("corral-lazy")]
    holders = {pid for pid, words in programs if str(server.data) in " ".join(words)}
    return [pid for pid, _ in programs if int(status_of(pid)["PPid"]) in holders]


def lazy_processes(server: Server) -> list[int]:
    """The server of lazy reads and its holder."""
    data = str(server.data)
    return [pid for pid, words in processes() if words[0].endswith("corral-lazy") and data in " ".join(words)]
