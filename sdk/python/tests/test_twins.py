"""The two clients are one."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import corral

ROOT = Path(__file__).resolve().parent.parent


def test_the_blocking_client_is_up_to_date() -> None:
    made = subprocess.run(
        [sys.executable, "tools/unasync.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr


def test_both_have_the_same_methods() -> None:
    for name in ("Client", "Sandbox", "Command", "Session", "Pty", "Files"):
        one, other = getattr(corral, name), getattr(corral, f"Async{name}")
        public = {n for n in vars(one) if not n.startswith("_")}
        assert public == {"close" if n == "aclose" else n for n in vars(other) if not n.startswith("_")}, name
        for method in public:
            twin = getattr(other, method, None) or other.aclose
            if callable(twin):
                mine = list(inspect.signature(getattr(one, method)).parameters)
                assert mine == list(inspect.signature(twin).parameters), method


def test_everything_public_is_documented() -> None:
    for name in corral.__all__:
        if name != "__version__":
            assert inspect.getdoc(getattr(corral, name)), name
