"""What a corpus of images and environments asks: upgrades that write one layer, lists in pages."""

from __future__ import annotations

import hashlib
import io
import tarfile
import uuid
from pathlib import Path

import corral
from conftest import SMALL
from stores import node, objects
from support import Server, busybox_rootfs, docker_archive, tar_of

LARGE = 70 << 20


def noise(seed: str, size: int) -> bytes:
    """Bytes that do not compress, the same for the same seed."""
    return hashlib.shake_256(seed.encode()).digest(size)


def state(root: Path) -> dict[str, tuple[int, int]]:
    """Files below a directory, with what changes when one is written."""
    found = (path for path in root.rglob("*") if path.is_file())
    return {str(p.relative_to(root)): (p.stat().st_ino, p.stat().st_mtime_ns) for p in found}


def written(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> set[str]:
    return {name for name, mark in after.items() if before.get(name) != mark}


def test_an_upgrade_writes_one_layer_and_nothing_else(tmp_path: Path) -> None:
    """Three tasks on one base and one toolkit. The base has a large stack, which an upgrade of the system leaves be."""
    with node(tmp_path) as (server, client, store):
        stack = tar_of({"opt/stack": noise("stack", LARGE)})

        def base(version: str) -> corral.ImageRecord:
            system = io.BytesIO(busybox_rootfs())
            with tarfile.open(fileobj=system, mode="a") as archive:
                name = tarfile.TarInfo("etc/version")
                name.size = len(version)
                archive.addfile(name, io.BytesIO(version.encode()))
            file = tmp_path / "base.tar"
            file.write_bytes(docker_archive([system.getvalue(), stack], {}, "base:1"))
            return client.images.import_file(file, "base")

        def built(kind: str, at: str, files: dict[str, bytes]) -> str:
            file = tmp_path / "layer.tar"
            file.write_bytes(tar_of(files))
            return client.layers.build(file, kind=kind, at=at).digest

        def toolkit(version: str) -> str:
            return built("toolkit", "/opt/tool", {"version": version.encode()})

        first, tool = base("1"), toolkit("1")
        assert len(first.layers) == 2
        tasks = [built("workspace", "/work", {"n": b"%d" % n}) for n in range(3)]

        def compose() -> None:
            for n, task in enumerate(tasks):
                spec = corral.EnvironmentSpec(base="base", workspaces=(task,), toolkits=(tool,))
                client.environments.put(f"task{n}", spec)

        def told() -> list[str]:
            look = "cat /etc/version /opt/tool/version /work/n; sha256sum < /opt/stack | cut -c1-8"
            out = []
            for n in range(3):
                with client.sandboxes.create(f"task{n}", limits=SMALL) as box:
                    out.append(box.exec(look, check=True).stdout)
            return out

        compose()
        sum_of_stack = hashlib.sha256(noise("stack", LARGE)).hexdigest()[:8]
        assert told() == [f"11{n}{sum_of_stack}\n" for n in range(3)]

        here, shared = state(server.data / "layers/layers"), objects(store)
        second = base("2")
        assert second.layers[1] == first.layers[1]
        new = {name for name in objects(store) - shared if name.endswith("/manifest")}
        assert len(new) == 1, "one layer is published"
        names = written(here, state(server.data / "layers/layers"))
        made = {name.split("/")[0].removesuffix(".json") for name in names}
        assert made == {second.layers[0].digest.removeprefix("sha256:")}, "one layer is written here"
        size = sum((store / name).stat().st_size for name in objects(store) - shared)
        assert size < 4 << 20, "and nothing of the stack"
        assert told() == [f"21{n}{sum_of_stack}\n" for n in range(3)], "every task has it"

        shared = objects(store)
        tool = toolkit("2")
        compose()
        assert len([name for name in objects(store) - shared if name.endswith("/manifest")]) == 1
        assert told() == [f"22{n}{sum_of_stack}\n" for n in range(3)]


def test_lists_come_in_pages(server: Server, client: corral.Client, bb: str) -> None:
    prefix = f"page-{uuid.uuid4().hex[:8]}"
    names = [f"{prefix}-{n:02}" for n in range(23)]
    for name in names:
        client.environments.put(name, corral.EnvironmentSpec(base=bb))
    try:
        with server.http() as http:
            seen, cursor, sizes = [], prefix, []
            while cursor and cursor.startswith(prefix):
                page = http.get("/v1/environments", params={"limit": 5, "cursor": cursor}).json()
                seen += [e["name"] for e in page["environments"] if e["name"].startswith(prefix)]
                sizes.append(len(page["environments"]))
                cursor = page.get("next_cursor")
            assert seen == names
            assert set(sizes[:-1]) == {5}
            for what in ("images", "layers", "environments"):
                assert len(http.get(f"/v1/{what}", params={"limit": 1}).json()[what]) == 1
                for limit in (0, 10_001, "many"):
                    refused = http.get(f"/v1/{what}", params={"limit": limit})
                    assert (refused.status_code, refused.json()["kind"]) == (400, "invalid_request")
        assert set(names) <= {e.name for e in client.environments.list()}
        assert prefix.encode() in server.cli("env", "ls").stdout
    finally:
        for name in names:
            client.environments.delete(name)
