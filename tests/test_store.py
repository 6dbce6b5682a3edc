"""A shared store of layers: what is made on a node is there, and a node that has nothing gets all from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import corral
from conftest import SMALL
from support import Server, with_busybox

pytestmark = pytest.mark.timeout(300)


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


def lose_layers(server: Server) -> None:
    """What a node is that was just added: it knows of images, and has no layer."""
    assert server.stop() == 0
    down = server.cli("down", "--data-dir", str(server.data))
    assert down.returncode == 0, down.stderr
    shutil.rmtree(server.data / "layers")
    server.start()


def test_a_node_without_layers_gets_them_from_the_store(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client, store):
        manifests = [name for name in objects(store) if name.endswith("/manifest")]
        assert len(manifests) == len(client.images.get("bb").layers)
        with client.sandboxes.create("bb", limits=SMALL) as box:
            box.exec("echo kept > /tmp/kept; rm /bin/ls", check=True)
            image = box.snapshot("state")
        assert len([name for name in objects(store) if name.endswith("/manifest")]) == len(image.layers)
        lose_layers(server)
        assert json.loads(server.cli("--json", "layer", "du").stdout)["elsewhere"] == len(image.layers)
        with client.sandboxes.create("state", limits=SMALL) as box:
            assert box.exec("cat /tmp/kept; [ -e /bin/ls ] || echo no ls").stdout == "kept\nno ls\n"
        usage = json.loads(server.cli("--json", "layer", "du").stdout)
        assert usage["elsewhere"] == 0
        assert all(layer["published"] and layer["chunks"] == layer["local_chunks"] for layer in usage["layers"])
        assert b"DIGEST" in server.cli("layer", "du").stdout


def test_many_at_once_fetch_a_layer_once(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client, _):
        lose_layers(server)
        made = client.sandboxes.create_many([corral.SandboxSpec(environment="bb", limits=SMALL)] * 20)
        boxes = [box for box in made if isinstance(box, corral.Sandbox)]
        assert len(boxes) == 20, made
        assert all(box.exec("echo here").stdout == "here\n" for box in boxes)
        for box in boxes:
            box.delete()


def test_a_store_that_is_gone_or_damaged_is_said_so(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client, store):
        lose_layers(server)
        [pack] = (store / name for name in objects(store) if name.startswith("packs/"))
        sound = pack.read_bytes()
        pack.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        with pytest.raises(corral.CorralError) as caught:
            client.sandboxes.create("bb", limits=SMALL)
        assert caught.value.kind == "digest_mismatch"
        pack.write_bytes(sound)
        (store / "packs").rename(tmp_path / "away")
        with server.client(retry=corral.RetryPolicy(attempts=1)) as hasty, pytest.raises(corral.CorralError) as gone:
            hasty.sandboxes.create("bb", limits=SMALL)
        assert gone.value.infra_failed or gone.value.retryable, gone.value
        (tmp_path / "away").rename(store / "packs")
        with client.sandboxes.create("bb", limits=SMALL) as box:
            assert box.exec("echo back").stdout == "back\n"
        ended = [box.status.end for box in client.sandboxes.list(state="ended")]
        assert {end.reason for end in ended if end is not None} >= {corral.EndReason.IMAGE_UNAVAILABLE}


def test_what_nothing_needs_is_collected(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client, store):
        with client.sandboxes.create("bb", limits=SMALL) as box:
            box.exec("head -c 1000000 /dev/urandom > /tmp/big", check=True)
            box.snapshot("one")
            box.exec("echo more > /tmp/more", check=True)
            box.snapshot("two")
        before = objects(store)

        def collect(*words: str) -> dict[str, object]:
            done = server.cli("--json", "layer", "gc", *words)
            assert done.returncode == 0, done.stderr
            return dict(json.loads(done.stdout))

        assert collect("--grace", "0s")["layers"] == []
        client.images.delete("one")
        assert collect()["layers"] == [], "not yet"
        assert objects(store) >= before
        assert len(collect("--grace", "0s", "--dry-run")["layers"]) == 1  # type: ignore[arg-type]
        done = collect("--grace", "0s")
        assert len(done["layers"]) == 1  # type: ignore[arg-type]
        lose_layers(server)
        with client.sandboxes.create("two", limits=SMALL) as box:
            assert box.exec("cat /tmp/more; wc -c < /tmp/big").stdout == "more\n1000000\n"


def test_without_a_store(server: Server) -> None:
    refused = server.cli("--json", "layer", "gc")
    assert refused.returncode == 1
    assert json.loads(refused.stderr or refused.stdout)["kind"] == "unsupported"
    assert json.loads(server.cli("--json", "layer", "du").stdout)["elsewhere"] == 0


@pytest.mark.parametrize(
    "url", ["/no/url", "ftp://host/x", "s3://bucket", "file:///d?what=1", "s3://k:s@bucket?region=r"]
)
def test_a_store_that_cannot_be_is_refused(server: Server, url: str) -> None:
    done = server.cli("up", "--ephemeral", "--store", url)
    assert done.returncode == 2
    assert b"--store" in done.stderr


def test_a_directory_that_is_not_there(server: Server) -> None:
    done = server.cli("up", "--ephemeral", "--listen", "127.0.0.1:0", "--store", "file:///no/such/directory")
    assert done.returncode == 1
    assert b"/no/such/directory" in done.stderr
