"""Images, layers, environments, keys and nodes."""

# Made from ../_async by tools/unasync.py; do not edit.

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from .. import _tar
from .._errors import BuildFailed, ConnectionFailed, ProtocolError, error_of
from .._lines import LineSplitter
from .._requests import Request, parse, path, query
from .._retry import Repeat
from .._types import (
    BuildProgress,
    EnvironmentRecord,
    EnvironmentSpec,
    GcResult,
    ImageDiff,
    ImageRecord,
    ImportProgress,
    KeyRecord,
    LayerKind,
    LayerRecord,
    LayerUsageList,
    Limits,
    NewKey,
    NodeStatus,
    decode,
    to_wire,
)
from . import _backend
from ._save import save
from ._transport import Transport, chunks

OnProgress = Callable[[ImportProgress], None]
OnBuildProgress = Callable[[BuildProgress], None]
_TAR = {"content-type": "application/x-tar"}


def _pieces(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), 1 << 20):
        yield data[at : at + (1 << 20)]


def _tar_of(source: str | os.PathLike[str]) -> Iterator[bytes]:
    return _tar.pack(source) if os.path.isdir(source) else _tar.read(source)


def _follow(
    transport: Transport, request: Request, on_event: Callable[[dict[str, Any]], None], what: str
) -> dict[str, Any]:
    """Follows an import or build to its last line."""
    lines = LineSplitter()
    with transport.stream(request) as response:
        for chunk in chunks(response, transport.endpoint.url):
            for line in lines.feed(chunk):
                if not line.strip():
                    continue
                event: dict[str, Any] = parse(line)
                if event.get("event") == "failed":
                    error = error_of(event.get("problem") or {})
                    if isinstance(error, BuildFailed):
                        error.number, error.exit_code = event.get("number"), event.get("exit_code")
                        error.output = event.get("output")
                    raise error
                on_event(event)
                if event.get("event") in {"imported", "built"}:
                    return event
    raise ConnectionFailed(f"the {what} broke off before its end", retryable=True)


def _import(transport: Transport, request: Request, on_progress: OnProgress | None) -> dict[str, Any]:
    def told(event: dict[str, Any]) -> None:
        if on_progress is not None:
            on_progress(decode(ImportProgress, event))

    return _follow(transport, request, told, "import")


def _all(transport: Transport, what: str) -> list[Mapping[str, Any]]:
    """A list from all its pages."""
    items: list[Mapping[str, Any]] = []
    cursor: str | None = None
    while True:
        page = transport.json(Request("GET", path(what), params=query(cursor=cursor)))
        items += page[what]
        cursor = page.get("next_cursor")
        if not cursor:
            return items


class Images:
    """Imported images."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def import_registry(
        self,
        reference: str,
        *,
        name: str | None = None,
        username: str | None = None,
        password: str | None = None,
        platform: str | None = None,
        plain_http: bool = False,
        on_progress: OnProgress | None = None,
    ) -> ImageRecord:
        """Imports an image from a registry, such as ``registry.example:5000/team/image:tag``."""
        body: dict[str, Any] = {"reference": reference}
        body |= {
            key: value
            for key, value in {
                "name": name,
                "username": username,
                "password": password,
                "platform": platform,
                "plain_http": plain_http or None,
            }.items()
            if value is not None
        }
        request = Request("POST", "/v1/images:import", json=body, read_timeout=None)
        return self._record(_import(self._transport, request, on_progress))

    def import_file(
        self,
        source: str | os.PathLike[str],
        name: str,
        *,
        kind: str = "auto",
        platform: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> ImageRecord:
        """Imports an image from a local ``docker save`` archive, OCI layout, root file system tar, or directory.

        ``kind`` is ``auto``, ``archive`` or ``rootfs``; a directory that is an OCI layout is told by its content.
        """
        request = Request(
            "PUT",
            path("images", name),
            params=query(kind=kind, platform=platform),
            body=lambda: _backend.from_iterator(lambda: _tar_of(source)),
            headers=_TAR,
            read_timeout=None,
        )
        return self._record(_import(self._transport, request, on_progress))

    def open_export(self, name: str) -> Generator[bytes, None, None]:
        """Yields an image as an archive that docker, podman and skopeo load: OCI layout and ``docker save`` in one."""
        request = Request("GET", path("images", name, "archive"), read_timeout=None)
        with self._transport.stream(request) as response:
            for chunk in chunks(response, self._transport.endpoint.url):
                yield chunk

    def export(self, name: str, target: str | os.PathLike[str]) -> Path:
        """Writes an image to an archive (see :meth:`open_export`); the target appears when it is whole."""
        with closing(self.open_export(name)) as source:
            return save(source, target)

    def build(
        self,
        context: str | os.PathLike[str] | bytes,
        name: str,
        *,
        dockerfile: str | None = None,
        build_args: Mapping[str, str] | None = None,
        target: str | None = None,
        no_cache: bool = False,
        limits: Limits | None = None,
        on_progress: OnBuildProgress | None = None,
    ) -> ImageRecord:
        """Builds an image from a Dockerfile.

        ``context`` is a directory, a tar file (plain, gzip or zstd), or the bytes of one; ``dockerfile`` is a path in
        it. ``FROM`` names images that were imported. Steps run in sandboxes with ``limits``, without a network; their
        results are kept, so that a build that repeats them runs nothing. What ``.dockerignore`` names takes no part.

        A step that fails raises :class:`BuildFailed`.
        """
        args = [f"{key}={value}" for key, value in (build_args or {}).items()]
        params = query(dockerfile=dockerfile, target=target, no_cache=no_cache or None, build_arg=args or None)
        if limits is not None:
            params |= {name: getattr(limits, name) for name in ("memory_mib", "cpus", "pids", "disk_mib")}
        source = context
        request = Request(
            "PUT",
            f"{path('images', name)}/build",
            params=params,
            body=lambda: _backend.from_iterator(
                lambda: _pieces(source) if isinstance(source, bytes) else _tar_of(source)
            ),
            headers=_TAR,
            read_timeout=None,
        )

        def told(event: dict[str, Any]) -> None:
            if on_progress is not None:
                on_progress(decode(BuildProgress, event))

        return self._record(_follow(self._transport, request, told, "build"))

    @staticmethod
    def _record(event: dict[str, Any]) -> ImageRecord:
        if "image" not in event:
            raise ProtocolError("the import ended without an image")
        return decode(ImageRecord, event["image"])

    def list(self) -> list[ImageRecord]:
        """The images, by name."""
        return [decode(ImageRecord, image) for image in _all(self._transport, "images")]

    def get(self, name: str) -> ImageRecord:
        """An image by its name."""
        return decode(ImageRecord, self._transport.json(Request("GET", path("images", name))))

    def diff(self, name: str, *, from_: str, limit: int | None = None) -> ImageDiff:
        """What differs between two images: paths added, changed and deleted since ``from_``."""
        params = {"from": from_} | query(limit=limit)
        return decode(ImageDiff, self._transport.json(Request("GET", path("images", name, "diff"), params=params)))

    def delete(self, name: str) -> None:
        """Deletes an image."""
        self._transport.send(Request("DELETE", path("images", name), gone_is_done=True))


class Layers:
    """Stored layers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def build(
        self,
        source: str | os.PathLike[str],
        *,
        kind: LayerKind | str,
        at: str,
        on_progress: OnProgress | None = None,
    ) -> LayerRecord:
        """Builds a ``workspace`` or ``toolkit`` layer from a local directory or tar file.

        ``at`` is the absolute path of its content inside the sandbox.
        """
        request = Request(
            "PUT",
            path("layers"),
            params=query(kind=str(kind), at=at),
            body=lambda: _backend.from_iterator(lambda: _tar_of(source)),
            headers=_TAR,
            read_timeout=None,
        )
        event = _import(self._transport, request, on_progress)
        return decode(LayerRecord, event.get("layer"))

    def list(self) -> list[LayerRecord]:
        """The layers, by digest."""
        return [decode(LayerRecord, layer) for layer in _all(self._transport, "layers")]

    def usage(self) -> LayerUsageList:
        """What layers take on the node and in the shared store, and what was read of those that are not wholly here."""
        return decode(LayerUsageList, self._transport.json(Request("GET", path("layers:usage"))))

    def gc(self, *, grace: float | None = None, dry_run: bool = False) -> GcResult:
        """Removes what no image, layer, environment or sandbox needs, from the node and the shared store.

        ``grace`` is for how many seconds it must not have been needed: a day where absent. With ``dry_run`` nothing is
        removed, and the answer says what would be.
        """
        body: dict[str, Any] = {"dry_run": dry_run}
        if grace is not None:
            body["grace_ms"] = round(grace * 1000)
        # Done again it would tell of less.
        request = Request("POST", path("layers:gc"), json=body, repeat=Repeat.REFUSED, read_timeout=None)
        return decode(GcResult, self._transport.json(request))

    def delete(self, digest: str) -> None:
        """Deletes a layer that nothing uses."""
        self._transport.send(Request("DELETE", path("layers", digest), gone_is_done=True))


class Environments:
    """Named environments."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def put(self, name: str, spec: EnvironmentSpec) -> EnvironmentRecord:
        """Stores an environment under a name, in place of the one there."""
        request = Request("PUT", path("environments", name), json=to_wire(spec))
        return decode(EnvironmentRecord, self._transport.json(request))

    def get(self, name: str) -> EnvironmentRecord:
        """An environment by its name."""
        return decode(EnvironmentRecord, self._transport.json(Request("GET", path("environments", name))))

    def list(self) -> list[EnvironmentRecord]:
        """The environments, by name."""
        return [decode(EnvironmentRecord, item) for item in _all(self._transport, "environments")]

    def delete(self, name: str) -> None:
        """Deletes an environment; its image and layers stay."""
        self._transport.send(Request("DELETE", path("environments", name), gone_is_done=True))


class Keys:
    """API keys."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, name: str) -> NewKey:
        """Makes a key; its text is shown only now."""
        request = Request("POST", path("keys"), json={"name": name}, repeat=Repeat.REFUSED)
        return decode(NewKey, self._transport.json(request))

    def list(self) -> list[KeyRecord]:
        """The keys, by id."""
        listed = self._transport.json(Request("GET", path("keys")))
        return [decode(KeyRecord, key) for key in listed["keys"]]

    def delete(self, key_id: str) -> None:
        """Deletes a key."""
        self._transport.send(Request("DELETE", path("keys", key_id), gone_is_done=True))


class Nodes:
    """The machines sandboxes run on."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> list[NodeStatus]:
        """The nodes, by id."""
        listed = self._transport.json(Request("GET", path("nodes")))
        return [decode(NodeStatus, node) for node in listed["nodes"]]
