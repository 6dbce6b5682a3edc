"""Files inside a sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ._enums import OpenEnum


class FileType(OpenEnum):
    """What a path names."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class FileStatus:
    """A file's attributes."""

    path: str
    """Path as asked for; in lists, relative to the listed directory."""
    file_type: FileType = FileType.FILE
    """Sort; symbolic links are not followed."""
    size_bytes: int = 0
    """Size."""
    mode: int = 0
    """Permission bits."""
    uid: int = 0
    """Owner inside."""
    gid: int = 0
    """Group inside."""
    mtime_ms: int = 0
    """Last change of the content, milliseconds since 1970."""
    link_target: str | None = None
    """Target of a symbolic link."""
    path_base64: str | None = None
    """In lists, where the path is not UTF-8: its bytes in Base64; `path` is then only its readable form."""
    link_target_base64: str | None = None
    """Where the target is not UTF-8: its bytes in Base64; `link_target` is then only its readable form."""


@dataclass(frozen=True, slots=True)
class DirectoryPage:
    """A directory's entries, sorted by path."""

    entries: tuple[FileStatus, ...] = ()
    """Entries."""
    truncated: bool = False
    """Whether there were more than the limit."""

    def __iter__(self) -> Iterator[FileStatus]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change below a watched directory."""

    event: str
    """``ready``, ``created``, ``modified``, ``removed``, ``attributes`` or ``overflow``."""
    path: str = ""
    """Relative to the watched directory."""
