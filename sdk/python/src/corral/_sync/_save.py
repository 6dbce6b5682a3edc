"""Streams into local files."""

# Made from ../_async by tools/unasync.py; do not edit.

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from . import _backend


def _other(target: str | os.PathLike[str]) -> BinaryIO | None:
    """What is at the target and no file, opened: it takes the bytes as they come."""
    if os.path.exists(target) and not os.path.isfile(target):
        return open(target, "wb")
    return None


def _followed(target: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(target))


def save(source: Iterator[bytes], target: str | os.PathLike[str]) -> Path:
    """Writes what comes to a file, in constant memory; its name appears when it is whole. A link stays a link."""
    if other := _other(target):
        with other:
            for chunk in source:
                _backend.in_thread(other.write, chunk)
        return Path(target)
    final = _followed(target)
    with tempfile.NamedTemporaryFile(dir=final.parent, prefix=f".{final.name}.", delete=False) as local:
        try:
            for chunk in source:
                _backend.in_thread(local.write, chunk)
            local.flush()
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(local.fileno(), 0o666 & ~umask)
            os.replace(local.name, final)
        except BaseException:
            os.unlink(local.name)
            raise
    return Path(target)
