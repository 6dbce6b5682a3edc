"""Images, layers and environments."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import corral
from conftest import Make
from support import Server, busybox_rootfs, docker_archive, free_port, tar_of, until


@pytest.fixture
def name(client: corral.Client) -> Iterator[str]:
    made = f"test/{uuid.uuid4().hex}:1"
    yield made
    for environment in client.environments.list():
        if environment.name.startswith("test-"):
            client.environments.delete(environment.name)
    if made in [image.name for image in client.images.list()]:
        client.images.delete(made)


def test_a_docker_archive(client: corral.Client, make: Make, name: str, tmp_path: Path) -> None:
    upper = tar_of({"data/kept": b"upper", ".wh.root": b"", "etc/.wh.group": b"", "data/.wh..wh..opq": b""})
    middle = tar_of({"data/hidden": b"x", "data/kept": b"lower"})
    config = {"Env": ["PATH=/bin", "FROM=image"], "WorkingDir": "/data", "User": "agent", "Cmd": ["sh"]}
    file = tmp_path / "image.tar"
    file.write_bytes(docker_archive([busybox_rootfs(), middle, upper], config, "x:1"))
    seen: list[str] = []
    record = client.images.import_file(file, name, on_progress=lambda p: seen.append(p.event))
    assert seen[-1] == "imported"
    assert (record.name, record.config.workdir, record.config.user) == (name, "/data", "agent")
    assert client.images.get(name) == record
    sandbox = make(name)
    result = sandbox.exec("pwd; id -u; echo $FROM; cat kept; ls; ls -d /root /etc/group")
    assert result.stdout.splitlines() == ["/data", "1000", "image", "upper" + "kept"]


def test_a_rootfs_and_a_directory_are_one(client: corral.Client, make: Make, name: str, tmp_path: Path) -> None:
    directory = tmp_path / "root"
    directory.mkdir()
    with tarfile.open(fileobj=io.BytesIO(busybox_rootfs())) as archive:
        archive.extractall(directory, filter="fully_trusted", numeric_owner=True)
    os.chown(directory / "tmp", 1234, 4321)
    record = client.images.import_file(directory, name, kind="rootfs")
    assert record.size_bytes == sum(layer.size_bytes for layer in record.layers)
    status = make(name).files.stat("/tmp")
    assert (status.uid, status.gid, status.mode & 0o7777) == (1234, 4321, 0o1777)


def test_a_registry(client: corral.Client, make: Make, name: str, tmp_path: Path) -> None:
    port = free_port()
    config = tmp_path / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path}/r}}}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n"
    )
    file = tmp_path / "image.tar"
    file.write_bytes(docker_archive([busybox_rootfs()], {"Env": ["A=1"]}, "x:1"))
    registry = subprocess.Popen(
        ["docker-registry", "serve", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        target = f"docker://127.0.0.1:{port}/team/image:1"

        def push() -> bool:
            command = ["skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"docker-archive:{file}", target]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        until(push, 60, "the registry takes the image")
        record = client.images.import_registry(f"127.0.0.1:{port}/team/image:1", name=name, plain_http=True)
        assert record.source_digest is not None
        assert record.source_digest.startswith("sha256:")
        assert make(name).exec("echo $A").stdout == "1\n"
        with pytest.raises(corral.CorralError) as caught:
            client.images.import_registry(f"127.0.0.1:{port}/team/none:1", name=name + "x", plain_http=True)
        assert caught.value.kind in {"not_found", "upstream_failed", "invalid_image"}
    finally:
        registry.terminate()
        registry.wait(30)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no archive" * 1000,
        tar_of({"manifest.json": b"[]"}),
        tar_of({"manifest.json": b"{"}),
        tar_of({"oci-layout": b"{}"}),
    ],
    ids=["empty", "noise", "nothing listed", "torn", "no index"],
)
def test_archives_that_are_none(client: corral.Client, name: str, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.tar"
    file.write_bytes(content)
    with pytest.raises(corral.CorralError) as caught:
        client.images.import_file(file, name, kind="archive")
    assert caught.value.kind in {"invalid_image", "invalid_request"}, caught.value
    assert not caught.value.infra_failed
    assert name not in [image.name for image in client.images.list()]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PK\x03\x04" + bytes(2000), "a zip archive"),
        (b"\xfd7zXZ\0" + bytes(2000), "xz"),
        (gzip.compress(b"<html></html>"), "HTML"),
        (b"", "it is empty"),
    ],
    ids=["zip", "xz", "packed HTML", "empty"],
)
@pytest.mark.parametrize("kind", ["auto", "archive", "rootfs", "layer"])
def test_what_is_no_archive_is_told(
    client: corral.Client, server: Server, name: str, tmp_path: Path, content: bytes, says: str, kind: str
) -> None:
    file = tmp_path / "bad.tar"
    file.write_bytes(content)
    with pytest.raises(corral.InvalidImage) as caught:
        if kind == "layer":
            client.layers.build(file, kind="workspace", at="/w")
        else:
            client.images.import_file(file, name, kind=kind)
    assert caught.value.message.startswith("the upload: not a "), caught.value
    assert says in caught.value.message
    assert str(server.data) not in caught.value.message


def test_a_layer_with_another_content_than_its_digest(client: corral.Client, name: str, tmp_path: Path) -> None:
    good = docker_archive([busybox_rootfs()], {}, "x:1")
    digest = hashlib.sha256(busybox_rootfs()).hexdigest().encode()
    file = tmp_path / "image.tar"
    file.write_bytes(good.replace(digest, b"0" * 64))
    with pytest.raises(corral.InvalidImage):
        client.images.import_file(file, name)


def test_an_environment_is_composed(client: corral.Client, make: Make, bb: str, name: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "src").mkdir(parents=True)
    (work / "src" / "task").write_text("task\n")
    (work / "both").write_text("workspace\n")
    tools = tmp_path / "tools.tar"
    tools.write_bytes(tar_of({"tool": b"#!/bin/sh\necho tool\n", "both": b"toolkit\n"}))
    workspace = client.layers.build(work, kind="workspace", at="/w")
    toolkit = client.layers.build(tools, kind=corral.LayerKind.TOOLKIT, at="/w")
    assert client.layers.build(work, kind="workspace", at="/w").digest == workspace.digest, "building is reproducible"
    assert {workspace.digest, toolkit.digest} <= {layer.digest for layer in client.layers.list()}
    spec = corral.EnvironmentSpec(
        base=bb,
        workspaces=(workspace.digest,),
        toolkits=(toolkit.digest,),
        env={"E": "env"},
        workdir="/w",
        user="agent",
    )
    record = client.environments.put("test-composed", spec)
    assert record.spec == spec
    assert client.environments.get("test-composed") == record
    for sandbox in (make("test-composed"), make(spec=spec)):
        result = sandbox.exec("pwd; id -u; echo $E; cat src/task both; sh tool")
        assert result.stdout.splitlines() == ["/w", "1000", "env", "task", "toolkit", "tool"]
        sandbox.exec("echo changed > /w/src/task; rm /w/both", user="root", check=True)
    assert make("test-composed").exec("cat src/task both").stdout == "task\ntoolkit\n", "layers do not change"
    with pytest.raises(corral.Conflict):
        client.layers.delete(workspace.digest)
    client.environments.delete("test-composed")
    with pytest.raises(corral.NotFound):
        client.environments.get("test-composed")


def test_what_an_environment_names_must_be_there(client: corral.Client, bb: str) -> None:
    missing = "sha256:" + "0" * 64
    for spec in (
        corral.EnvironmentSpec(base="never-imported"),
        corral.EnvironmentSpec(base=bb, workspaces=(missing,)),
        corral.EnvironmentSpec(base=bb, toolkits=(missing,)),
    ):
        with pytest.raises((corral.NotFound, corral.InvalidRequest)):
            client.environments.put("test-broken", spec)


def test_a_layer_in_use_stays_until_its_sandbox_ends(
    client: corral.Client, make: Make, bb: str, tmp_path: Path
) -> None:
    file = tmp_path / "unique"
    file.mkdir()
    (file / "data").write_text(uuid.uuid4().hex)
    layer = client.layers.build(file, kind="workspace", at="/w")
    sandbox = make(spec=corral.EnvironmentSpec(base=bb, workspaces=(layer.digest,)))
    try:
        client.layers.delete(layer.digest)
    except corral.Conflict:
        assert layer.digest in {found.digest for found in client.layers.list()}
    assert sandbox.exec("cat /w/data").stdout == (file / "data").read_text()
    sandbox.delete()
    if layer.digest in {found.digest for found in client.layers.list()}:
        client.layers.delete(layer.digest)
    assert layer.digest not in {found.digest for found in client.layers.list()}


def test_a_layer_whose_file_is_damaged_or_gone(tmp_path: Path) -> None:
    """On a node of its own, since its store is damaged from outside."""
    server = Server(True).start()
    try:
        with server.client(retry=corral.RetryPolicy(attempts=1)) as client:
            for image in ("whole", "short", "changed", "gone"):
                file = tmp_path / f"{image}.tar"
                file.write_bytes(tar_of({"which": image.encode() * 50_000}))
                client.images.import_file(file, image, kind="rootfs")
                [layer] = client.images.get(image).layers
                stored = server.data / "layers" / "layers" / layer.digest.removeprefix("sha256:")
                match image:
                    case "short":
                        os.truncate(stored / "data", 10)
                    case "changed":
                        with (stored / "meta").open("r+b") as content:
                            content.seek(1024)
                            content.write(b"\0" * 64)
                    case "gone":
                        (stored / "data").unlink()
            for image in ("short", "changed", "gone"):
                with pytest.raises(corral.CorralError) as caught:
                    client.sandboxes.create(image)
                error = caught.value
                assert error.kind in {"digest_mismatch", "not_found", "storage_error"}, error
                assert not isinstance(error, corral.InvalidRequest)
                [ended] = client.sandboxes.list(state="ended", environment=image)
                assert ended.status.end is not None
                assert ended.status.end.reason in {"image_unavailable", "storage_error"}
                assert ended.status.end.infra_failed
            with client.sandboxes.create("whole") as box:
                assert box.files.read("/which").startswith("whole")
        assert server.stop() == 0
        assert not any(server.remains().values()), server.remains()
    finally:
        server.end()
