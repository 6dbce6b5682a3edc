"""One node for the whole suite; nothing may be left of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import corral
from support import LIBEXEC, PROGRAM, Server, busybox_rootfs

SMALL = corral.Limits(memory_mib=128, cpus=1.0, pids=64, disk_mib=64)
NEEDS_NO_NODE = {"test_documents.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The crash tests come last: they load the machine."""
    items.sort(key=lambda item: item.path.name in {"test_crashes.py", "test_growth.py"})


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    if os.geteuid() != 0:
        pytest.skip("sandboxes are made by root only")
    for needed in (PROGRAM, LIBEXEC / "corral-keeper", LIBEXEC / "corral-guest"):
        if not needed.exists():
            pytest.fail(f"{needed} is missing: run make build, or set CORRAL_BIN and CORRAL_LIBEXEC")
    made = Server(ephemeral=True)
    made.start()
    try:
        yield made
        with made.client() as client:
            alive = [s.id for s in client.sandboxes.list() if s.state != "ended"]
        assert made.process is not None
        assert made.process.poll() is None, f"the daemon died:\n{made.tail()}"
        assert made.stop() == 0, made.tail()
        assert not alive, f"tests left sandboxes: {alive}"
        assert not any(made.remains().values()), made.remains()
        panics = [line for line in made.log.read_text().splitlines() if "panicked" in line]
        assert not panics, panics
    finally:
        made.end()


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[corral.Client]:
    with server.client() as made:
        yield made


@pytest.fixture(scope="session")
def bb(client: corral.Client, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small image: busybox and a user."""
    file = tmp_path_factory.mktemp("bb") / "bb.tar"
    file.write_bytes(busybox_rootfs())
    client.images.import_file(file, "bb", kind="rootfs")
    return "bb"


@pytest.fixture(scope="session")
def debian(client: corral.Client) -> str:
    """Debian with Python and git."""
    import ingredients

    client.images.import_file(ingredients.base(), "debian", kind="rootfs")
    return "debian"


Make = Callable[..., corral.Sandbox]


@pytest.fixture
def make(client: corral.Client, bb: str) -> Iterator[Make]:
    """Makes sandboxes that are removed with the test."""
    made: list[corral.Sandbox] = []

    def create(environment: str | None = None, **options: object) -> corral.Sandbox:
        options.setdefault("limits", SMALL)
        options.setdefault("max_ttl", 900)
        if environment is None and "spec" not in options and "image" not in options:
            environment = bb
        made.append(client.sandboxes.create(environment, **options))  # type: ignore[arg-type]
        return made[-1]

    yield create
    for sandbox in made:
        sandbox.delete()


@pytest.fixture
def box(make: Make) -> corral.Sandbox:
    """A sandbox from the small image."""
    return make()


@pytest.fixture
def debian_box(make: Make, debian: str) -> corral.Sandbox:
    """A sandbox with Python."""
    return make(debian, limits=corral.Limits(memory_mib=256, cpus=1.0, pids=64, disk_mib=128))


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path
