"""The root file system that every arm runs: busybox with its applets, and nothing else."""

from __future__ import annotations

import tarfile
from pathlib import Path

from process import Failed, run

BUSYBOX = Path("/bin/busybox")


def build(directory: Path, archive: Path) -> None:
    """Makes the tree (for what mounts a directory) and a tar of it (for what imports one)."""
    if not BUSYBOX.exists():
        raise Failed("/bin/busybox is missing: install busybox-static")
    if "statically linked" not in _kind():
        raise Failed("/bin/busybox needs libraries: install busybox-static in place of busybox")
    for name in ("bin", "dev", "etc", "proc", "root", "sys", "tmp"):
        (directory / name).mkdir(parents=True)
    (directory / "bin/busybox").write_bytes(BUSYBOX.read_bytes())
    (directory / "bin/busybox").chmod(0o755)
    for applet in run([BUSYBOX, "--list"], 10).split():
        if applet != "busybox":
            (directory / "bin" / applet).symlink_to("busybox")
    (directory / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (directory / "etc/group").write_text("root:x:0:\n")
    with tarfile.open(archive, "w") as tar:
        tar.add(directory, arcname=".", filter=_plain)


def _kind() -> str:
    # A dynamic executable names its interpreter.
    return "dynamic" if b"/ld-linux" in BUSYBOX.read_bytes() else "statically linked"


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = 0
    return info
