"""What the demo's environment is made of: a Debian base, a project with its tests, and pytest. Made once, then kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

SUITE = "bookworm"
BASE_PACKAGES = "python3,git,ca-certificates"
PROJECT = "cachetools"
VERSION = "8.0.2"
SHA256 = "30ac523adfc118b51d2b2e7bad8a0ddb31370dfe2700c7f10ca224f36ccf81e0"
TOOLS = ["pytest==9.2.0", "pluggy==1.7.0", "iniconfig==2.3.1", "packaging==26.4", "pygments==2.21.0"]
PYTHON_OF_BASE = "3.11"


def cache_directory() -> Path:
    """Where the ingredients are kept."""
    chosen = os.environ.get("CORRAL_DEMO_CACHE")
    directory = Path(chosen) if chosen else Path(__file__).resolve().parent.parent / "target" / "demo"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _once(path: Path, what: str, make: Callable[[Path], None]) -> Path:
    """Makes a file or directory beside its place, and moves it there when it is whole."""
    if path.exists():
        print(f"    {what}: kept from before ({path.name})")
        return path
    print(f"    {what}: making {path.name} …", flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        made = Path(scratch, path.name)
        make(made)
        made.rename(path)
    return path


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")


def base() -> Path:
    """A Debian root file system with Python and git, as a tar file."""

    def make(target: Path) -> None:
        if shutil.which("mmdebstrap") is None:
            raise RuntimeError("mmdebstrap is missing: run make setup")
        _run("mmdebstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", SUITE, str(target))

    return _once(cache_directory() / f"base-{SUITE}.tar", "base image", make)


def workspace() -> Path:
    """The project's source release, with its tests, as a directory."""

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            requirement = Path(scratch, "requirements.txt")
            requirement.write_text(f"{PROJECT}=={VERSION} --hash=sha256:{SHA256}\n")
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            _run(*pip, "--require-hashes", "--requirement", str(requirement), "--dest", scratch)
            archive = Path(scratch, f"{PROJECT}-{VERSION}.tar.gz")
            if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
                raise RuntimeError(f"{archive.name} is not the release this demo was written for")
            with tarfile.open(archive) as source:
                source.extractall(scratch, filter="data")
            Path(scratch, f"{PROJECT}-{VERSION}").rename(target)

    return _once(cache_directory() / f"workspace-{PROJECT}-{VERSION}", "workspace", make)


def toolkit() -> Path:
    """pytest and what it needs, as a directory for PYTHONPATH."""

    def make(target: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:"]
        _run(*pip, "--python-version", PYTHON_OF_BASE, "--target", str(target), *TOOLS)

    name = hashlib.sha256(" ".join([PYTHON_OF_BASE, *TOOLS]).encode()).hexdigest()[:12]
    return _once(cache_directory() / f"toolkit-pytest-{name}", "toolkit", make)
