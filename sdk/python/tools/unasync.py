"""Makes the blocking client from the asyncio one, so that the two cannot come apart.

Usage: python tools/unasync.py [--check]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "corral"
HAND_WRITTEN = {"_backend.py", "__init__.py"}
NOTE = "# Made from ../_async by tools/unasync.py; do not edit.\n"

RULES: list[tuple[str, str]] = [
    (r"\bAsyncGenerator\[(\w+), None\]", r"Generator[\1, None, None]"),
    (r"\basync def\b", "def"),
    (r"\basync for\b", "for"),
    (r"\basync with\b", "with"),
    (r"\bawait ", ""),
    (r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\baclosing\b", "closing"),
    (r"\baclose\b", "close"),
    (r"\baread\b", "read"),
    (r"\baiter_raw\b", "iter_raw"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\bAsync([A-Z]\w*)\b", r"\1"),
    (r"\basyncio client\b", "blocking client"),
]


def blocking(text: str) -> str:
    """The blocking form of a module."""
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text)

    # `AsyncIterable, AsyncIterator, Iterable, Iterator` has become a list with repeats.
    def names(match: re.Match[str]) -> str:
        return match.group(1) + ", ".join(dict.fromkeys(n.strip() for n in match.group(2).split(",")))

    text = re.sub(r"^(from collections\.abc import )(.+)$", names, text, flags=re.M)
    doc, rest = text.split("\n", 1)
    return _tidy(f"{doc}\n\n{NOTE}{rest}")


def _tidy(text: str) -> str:
    """Shorter names change where lines break and how imports are sorted."""
    for options in (["check", "--quiet", "--select", "I", "--fix"], ["format", "--quiet"]):
        command = [sys.executable, "-m", "ruff", *options, "--stdin-filename", str(PACKAGE / "_sync" / "made.py"), "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=PACKAGE).stdout
    return text


def main() -> int:
    """Writes the modules, or with ``--check`` says which are stale."""
    check = "--check" in sys.argv[1:]
    sources = [p for p in (PACKAGE / "_async").glob("*.py") if p.name not in HAND_WRITTEN]
    wanted = {p.name: blocking(p.read_text()) for p in sources}
    stale = []
    target = PACKAGE / "_sync"
    for path in target.glob("*.py"):
        if path.name not in HAND_WRITTEN and path.name not in wanted:
            stale.append(path.name)
            if not check:
                path.unlink()
    for name, text in wanted.items():
        path = target / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    if check and stale:
        print(f"stale: {', '.join(sorted(stale))}: run python tools/unasync.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
