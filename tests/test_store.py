"""A shared store of layers: what is made on a node is there, and a node that has nothing gets all from it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import threading
import time
from pathlib import Path

import httpx
import pytest

import corral
from conftest import SMALL
from stores import lazy_servers, lose_layers, make_big, node, objects, usage_of
from support import Server, tar_of, until, with_busybox

pytestmark = pytest.mark.timeout(300)


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
        assert all(layer["published"] for layer in usage["layers"])
        assert b"DIGEST" in server.cli("layer", "du").stdout


def test_what_is_not_read_is_not_fetched(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client, _):
        sums, digest = make_big(client)
        lose_layers(server)
        with client.sandboxes.create("big", limits=SMALL) as box:
            assert box.exec("ls /big | wc -l; stat -c %s /big/7").stdout == "40\n500000\n"
            assert usage_of(server, digest)["local_chunks"] == 0, "metadata is here, data is not"
            first = box.exec("md5sum /big/7 | cut -c 1-32").stdout.strip()
            assert first in sums
            usage = usage_of(server, digest)
            assert 4 <= usage["local_chunks"] < usage["chunks"] / 2, usage
            assert usage["reads"]["misses"] > 0
            assert 500_000 <= box.stats().fetched_bytes < 12_000_000
            assert box.exec("cd /big; md5sum *").stdout == sums
            until(lambda: usage_of(server, digest)["local_chunks"] == usage["chunks"], 30)
            until(lambda: not (server.data / "layers/layers" / digest[7:] / "present").exists(), 30)
            # New sandboxes read it from its own data.
            with client.sandboxes.create("big", limits=SMALL) as other:
                assert other.exec("cd /big; md5sum *").stdout == sums
            assert (server.data / "layers/mounts" / digest[7:]).exists()


def test_the_server_of_lazy_reads_dies_under_readers(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client, _):
        sums, _ = make_big(client)
        lose_layers(server)
        with client.sandboxes.create("big", limits=SMALL) as box:
            reader = box.start("for i in 1 2 3 4 5 6 7 8; do cd /big; for f in *; do md5sum $f; sleep 0.02; done; done")
            killed = 0
            while reader.refresh().running:
                for pid in lazy_servers(server):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    killed += 1
                time.sleep(0.3)
            assert killed > 3
            assert sorted(reader.output().decode().splitlines()) == sorted(sums.splitlines() * 8)
            # The node, too: readers go on, and it finds the server again.
            server.kill()
            server.start()
            assert box.exec("cd /big; md5sum *").stdout == sums


def test_a_read_that_cannot_be_served_is_the_platforms_fault(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client, store):
        make_big(client)
        lose_layers(server)
        with client.sandboxes.create("big", limits=SMALL) as box:
            assert box.exec("md5sum /big/1").ok
            packs = [store / name for name in objects(store) if name.startswith("packs/")]
            sound = {pack: pack.read_bytes() for pack in packs}
            for pack in packs:
                pack.write_bytes(bytes(len(sound[pack])))
            result = box.exec("md5sum /big/39", timeout=150)
            assert result.exit_code != 0
            until(lambda: box.command(result.command.id).status.cause == "platform", 30)
            assert box.exec("md5sum /big/1").ok, "what is here is read"
            events = client.events.page(sandbox_id=box.id).events
            [failed] = [event for event in events if event.type == "read_failed"][:1]
            assert failed.cause == corral.Cause.PLATFORM
            assert failed.command_id == result.command.id
            server.kill()
            server.start()
            assert box.exec("echo heard").ok
            time.sleep(1)  # nothing can be waited for: that nothing is told again is what is tested
            again = client.events.page(sandbox_id=box.id).events
            assert [e.type for e in again].count("read_failed") == [e.type for e in events].count("read_failed")
            for pack, content in sound.items():
                pack.write_bytes(content)
            until(lambda: box.exec("md5sum /big/39", timeout=150).ok, 30, "the store is back")
            assert box.exec("exit 3").command.cause is None


def test_layers_are_fetched_whole_where_that_is_asked_for(tmp_path: Path) -> None:
    with node(tmp_path, "--whole-layers") as (server, client, _):
        lose_layers(server)
        with client.sandboxes.create("bb", limits=SMALL) as box:
            assert box.exec("echo here").ok
        assert not lazy_servers(server)
        usage = json.loads(server.cli("--json", "layer", "du").stdout)["layers"]
        assert all(layer["chunks"] == layer["local_chunks"] for layer in usage)


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
        [meta] = (store / name for name in objects(store) if name.endswith("/meta"))
        sound = meta.read_bytes()
        meta.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        with pytest.raises(corral.CorralError) as caught:
            client.sandboxes.create("bb", limits=SMALL)
        assert caught.value.kind == "digest_mismatch"
        meta.write_bytes(sound)
        missing = meta.parent
        shutil.copytree(missing, missing.with_name("0" * 64))
        missing.rename(tmp_path / "away")
        assert_refused(server, "not_found", "is not in the shared store")
        (tmp_path / "away").rename(missing)
        with client.sandboxes.create("bb", limits=SMALL) as box:
            assert box.exec("echo back").stdout == "back\n"
        ended = [box.status.end for box in client.sandboxes.list(state="ended")]
        assert {end.reason for end in ended if end is not None} >= {corral.EndReason.IMAGE_UNAVAILABLE}


def assert_refused(server: Server, kind: str, words: str) -> None:
    hasty = server.client(retry=corral.RetryPolicy(attempts=1))
    with hasty, pytest.raises(corral.CorralError, match=words) as refused:
        hasty.sandboxes.create("bb", limits=SMALL)
    assert (refused.value.kind, refused.value.retryable) == (kind, kind == "unavailable")


def test_a_store_whose_mount_is_missing_is_said_so(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client, mount):
        lose_layers(server)
        assert server.stop() == 0
        mount.rename(tmp_path / "away")
        mount.mkdir()
        server.start()
        assert_refused(server, "unavailable", "its mount may be missing")
        shutil.rmtree(mount)  # the node has tried whether it can be written
        (tmp_path / "away").rename(mount)
        with client.sandboxes.create("bb", limits=SMALL) as box:
            assert box.exec("echo back").stdout == "back\n"


def test_nothing_is_made_in_the_place_of_a_store(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client, mount):
        before = objects(mount)
        assert server.stop() == 0
        mount.rename(tmp_path / "away")
        mount.mkdir()
        server.start()
        assert "its mount may be missing" in server.log.read_text()
        # What is here starts, and what is made is refused.
        with server.client(retry=corral.RetryPolicy(attempts=1)) as hasty:
            box = hasty.sandboxes.create("bb", limits=SMALL)
            box.exec("echo kept > /kept", check=True)
            with pytest.raises(corral.CorralError, match="is not the one this node used before") as refused:
                box.snapshot("state")
            assert refused.value.kind == "unavailable"
        assert server.cli("layer", "gc", "--grace", "0s").returncode == 1
        assert objects(mount) == set()
        assert server.stop() == 0
        shutil.rmtree(mount)
        (tmp_path / "away").rename(mount)
        server.start()
        client.sandboxes.get(box.id).snapshot("state")
        assert objects(mount) > before
        lose_layers(server)
        with client.sandboxes.create("state", limits=SMALL) as other:
            assert other.exec("cat /kept").stdout == "kept\n"


def test_layers_that_were_made_before_the_store_was_joined_are_published(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    server = Server()
    with with_busybox(server, tmp_path) as client:
        with client.sandboxes.create("bb", limits=SMALL) as box:
            box.exec("echo kept > /kept", check=True)
            layers = {layer.digest.removeprefix("sha256:") for layer in box.snapshot("state").layers}
        assert server.stop() == 0
        server.options = ("--store", f"file://{tmp_path / 'store'}")
        server.start()
        until(lambda: {f"layers/{layer}/manifest" for layer in layers} <= objects(tmp_path / "store"), 30)
        lose_layers(server)
        with client.sandboxes.create("state", limits=SMALL) as box:
            assert box.exec("cat /kept").stdout == "kept\n"


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
        [unneeded] = {layer.digest for layer in client.images.get("one").layers} - {
            layer.digest for layer in client.images.get("two").layers
        }
        client.images.delete("one")
        assert collect()["layers"] == [], "not yet"
        planned = client.layers.gc(grace=0, dry_run=True)
        assert (planned.layers, planned.dry_run) == ((unneeded,), True)
        assert objects(store) >= before
        assert len(collect("--grace", "0s", "--dry-run")["layers"]) == 1  # type: ignore[arg-type]
        # What uploads that were cut off have left.
        (store / ".tmp").mkdir(exist_ok=True)
        (store / ".tmp/torn").write_bytes(b"half")
        os.utime(store / ".tmp/torn", (0, 0))
        done = collect("--grace", "0s")
        assert len(done["layers"]) == 1  # type: ignore[arg-type]
        assert done["unfinished"] == 1
        assert not (store / ".tmp/torn").exists()
        lose_layers(server)
        with client.sandboxes.create("two", limits=SMALL) as box:
            assert box.exec("cat /tmp/more; wc -c < /tmp/big").stdout == "more\n1000000\n"


def test_what_is_made_beside_collections_is_whole(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client, _):
        stop, refused = threading.Event(), list[str]()

        def collect() -> None:
            with server.http() as http:
                while not stop.is_set():
                    answer = http.post("/v1/layers:gc", json={"grace_ms": 0})
                    if answer.status_code != 200:
                        refused.append(answer.text)

        collector = threading.Thread(target=collect)
        collector.start()
        try:
            with client.sandboxes.create("bb", limits=SMALL) as box:
                for n in range(20):
                    # One in three changes nothing: its layer is there, and is what the one before had alone.
                    box.exec(f"echo {n} > /tmp/{n % 3 and n}; head -c 200000 /dev/urandom > /tmp/noise", check=True)
                    box.snapshot(f"state-{n}")
                    if n % 3:
                        client.images.delete(f"state-{n}")
                        box.snapshot(f"state-{n}")
                archive = tmp_path / "tool.tar"
                archive.write_bytes(tar_of({"a.txt": b"text" * 1000}))
                tool = client.layers.build(archive, kind="toolkit", at="/opt/tool")
        finally:
            stop.set()
            collector.join()
        assert not refused, refused[0]
        lose_layers(server)
        for n in range(20):
            with client.sandboxes.create(f"state-{n}", limits=SMALL) as box:
                assert box.exec(f"cat /tmp/{n % 3 and n}; wc -c < /tmp/noise").stdout == f"{n}\n200000\n"
        spec = corral.EnvironmentSpec(base="bb", toolkits=(tool.digest,))
        with client.sandboxes.create(spec=spec, limits=SMALL) as box:
            assert box.exec("wc -c < /opt/tool/a.txt").stdout == "4000\n"


def test_a_store_that_others_use_is_not_collected(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client, store):
        with client.sandboxes.create("bb", limits=SMALL) as box:
            box.exec("echo kept > /kept", check=True)
            box.snapshot("state")
        before = objects(store)
        other = Server(False, "--store", f"file://{store}")
        try:
            other.start()
            for words in (["--grace", "0s"], ["--grace", "0s", "--dry-run"]):
                refused = other.cli("--json", "layer", "gc", *words)
                assert refused.returncode == 1
                problem = json.loads(refused.stderr)
                assert problem["kind"] == "conflict"
                assert server.node_id in problem["message"]
        finally:
            other.end()
        assert not any(other.remains().values())
        assert objects(store) - {f"users/{other.node_id}"} == before
        # One that is gone for good is told so by hand.
        assert server.cli("layer", "gc", "--grace", "0s").returncode == 1
        (store / "users" / other.node_id).unlink()
        done = server.cli("layer", "gc", "--grace", "0s")
        assert done.returncode == 0, done.stderr
        assert objects(store) == before


def test_what_a_cut_off_snapshot_left_is_collected(tmp_path: Path) -> None:
    """A layer that the node made and of which the catalogue never heard."""
    server = Server()
    with with_busybox(server, tmp_path) as client:
        with client.sandboxes.create("bb", limits=SMALL) as box:
            box.exec("head -c 1000000 /dev/urandom > /tmp/big", check=True)
            lost = box.snapshot("lost").layers[-1].digest
        catalogue = sqlite3.connect(server.data / "catalogue.sqlite")
        with contextlib.closing(catalogue), catalogue:
            for table in ("image_layers", "layers", "images"):
                key = "image" if table == "image_layers" else "digest" if table == "layers" else "name"
                catalogue.execute(f"DELETE FROM {table} WHERE {key} IN ('lost', ?)", (lost,))

        def collect(*words: str) -> dict[str, object]:
            return dict(json.loads(server.cli("--json", "layer", "gc", *words).stdout))

        assert collect()["local"] == [], "not yet"
        assert collect("--grace", "0s", "--dry-run")["local"] == [lost]
        assert server.data.joinpath("layers/layers", lost.removeprefix("sha256:")).exists()
        done = collect("--grace", "0s")
        assert done["local"] == [lost]
        assert int(str(done["local_bytes"])) > 1_000_000
        assert not server.data.joinpath("layers/layers", lost.removeprefix("sha256:")).exists()
        with client.sandboxes.create("bb", limits=SMALL) as box:
            assert box.exec("true").ok


def test_without_a_store(server: Server) -> None:
    collected = json.loads(server.cli("--json", "layer", "gc").stdout)
    assert (collected["layers"], collected["packs"], collected["local"]) == ([], 0, [])
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


def metrics(server: Server) -> dict[str, float]:
    lines = httpx.get(server.url + "/metrics", trust_env=False).text.splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("corral_lazy")}


def test_what_is_read_is_counted(tmp_path: Path) -> None:
    with node(tmp_path) as (server, client, _):
        _, digest = make_big(client)
        lose_layers(server)
        with client.sandboxes.create("big", limits=SMALL) as box:
            assert box.exec("md5sum /big/7").ok
            stats = box.stats()
            assert stats.read_bytes >= 500_000
            assert 4 <= stats.image_touched_chunks < stats.image_chunks / 2
            told = metrics(server)
            assert told["corral_lazy_server_up"] == 1
            assert told["corral_lazy_read_bytes_total"] >= stats.read_bytes
            assert told["corral_lazy_fetched_bytes_total"] >= stats.fetched_bytes
            assert told["corral_lazy_cache_misses_total"] > 0
            assert told["corral_lazy_fetch_duration_seconds_count"] > 0
            assert told['corral_lazy_fetch_duration_seconds_bucket{le="+Inf"}'] > 0
            assert told["corral_lazy_cache_limit_bytes"] > 1 << 30
            assert told['corral_lazy_server_restarts_total{cause="crashed"}'] == 0
            listed = json.loads(server.cli("--json", "layer", "stats").stdout)
            [layer] = [layer for layer in listed if layer["digest"] == digest]
            assert 4 <= layer["reads"]["touched_chunks"] < layer["chunks"]
            assert b"HIT RATE" in server.cli("layer", "stats").stdout
            usage = client.layers.usage()
            [told_layer] = [layer for layer in usage.layers if layer.digest == digest]
            assert told_layer.reads is not None
            assert told_layer.reads.touched_chunks >= 4
            assert (told_layer.published, told_layer.mounted) == (True, True)
            assert usage.cache_limit_bytes == told["corral_lazy_cache_limit_bytes"]
            assert b"IMAGE READ" in server.cli("stats", box.id).stdout
            [pid] = lazy_servers(server)
            os.kill(pid, signal.SIGSTOP)
            assert metrics(server)["corral_lazy_server_up"] == 0
            assert box.exec("md5sum /big/9").ok, "another server answers"
            until(lambda: metrics(server).get('corral_lazy_server_restarts_total{cause="still"}') == 1, 30)
            assert "it stood still and was killed" in server.log.read_text()


def cached(server: Server) -> int:
    return int(json.loads(server.cli("--json", "layer", "du").stdout)["cached_bytes"])


def test_the_cache_is_bounded_and_what_is_in_use_stays(tmp_path: Path) -> None:
    with node(tmp_path, "--cache-mib", "30") as (server, client, _):
        sums, layers = {}, {}
        for name in ("one", "two", "three"):
            sums[name], layers[name] = make_big(client, name)
        # Three of 20 MB each were made here and are in the store.
        until(lambda: cached(server) <= 30 << 20, 30, "what was made first went")
        lose_layers(server)

        def read(name: str) -> None:
            with client.sandboxes.create(name, limits=SMALL) as box:
                assert box.exec("cd /big; md5sum *").stdout == sums[name]

        def data(name: str) -> int:
            return int(usage_of(server, layers[name])["cached_bytes"])

        read("one")
        assert data("one") > 19_000_000
        read("two")
        until(lambda: data("one") == 0, 30, "what was used longest ago goes")
        assert data("two") > 19_000_000
        with client.sandboxes.create("two", limits=SMALL) as held:
            read("one")
            until(lambda: data("one") == 0, 30, "what no sandbox has goes, though it is newer")
            assert data("two") > 19_000_000
            with client.sandboxes.create("three", limits=SMALL) as other:
                assert other.exec("cd /big; md5sum *").stdout == sums["three"]
                until(lambda: "above its limit" in server.log.read_text(), 30, "all is in use")
                assert data("two") > 19_000_000
                assert data("three") > 19_000_000
                assert held.exec("cd /big; md5sum *").stdout == sums["two"]
        until(lambda: cached(server) <= 30 << 20, 30)
        for name in ("one", "two", "three"):
            read(name)
        usage = usage_of(server, layers["three"])
        assert usage["stored_bytes"] > 19_000_000
        assert usage["shared_bytes"] < usage["stored_bytes"]
        assert b"of 30" in server.cli("layer", "du").stdout
        told = metrics(server)
        assert told["corral_lazy_evictions_total"] >= 3
        assert told["corral_lazy_evicted_bytes_total"] > 50_000_000
        assert told["corral_lazy_cache_limit_bytes"] == 30 << 20


@pytest.mark.parametrize("limit", ["0", "-1", "many", "1.5", "99999999999"])
def test_a_limit_of_the_cache_that_cannot_be_is_refused(server: Server, limit: str) -> None:
    done = server.cli("up", "--ephemeral", "--store", "file:///tmp", f"--cache-mib={limit}")
    assert done.returncode == 2
    assert b"expected a number of MiB from 1 on" in done.stderr
