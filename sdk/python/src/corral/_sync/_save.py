"""Streams into local files."""

# Made from ../_async by tools/unasync.py; do not edit.

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import _backend


def save(source: Iterator[bytes], target: str | os.PathLike[str]) -> Path:
    """Writes what comes to a file, in constant memory; its name appears when it is whole."""
    final = Path(target)
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
    return final
