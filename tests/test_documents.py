"""What README.md and docs/ name exists: files, make targets, commands, routes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(os.environ.get("CORRAL_BIN", ROOT / "target" / "libexec" / "corral"))
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "sdk/python/*.md", "bench/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
MADE = ("target/", "bench/out/", ".venv/")
TOP = ("crates/", "docs/", "sdk/", "tests/", "demo/", "scripts/", "bench/", "openapi/", ".ci/", "deploy/")


def spans(text: str) -> Iterator[str]:
    """Code in a document: spans, and lines of blocks."""
    fence = re.compile(r"^```.*?^```", re.M | re.S)
    for block in fence.findall(text):
        yield from block.splitlines()[1:-1]
    yield from re.findall(r"`([^`\n]+)`", fence.sub("", text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_paths(document: Path) -> None:
    text = document.read_text()
    missing = []
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target and not target.startswith("mailto:") and not (document.parent / target).exists():
            missing.append(target)
    for span in spans(text):
        for word in re.findall(r"[\w./*-]+", span):
            named = word.rstrip(".").removesuffix("/")
            if word.startswith(TOP) and not word.startswith(MADE) and not list(ROOT.glob(named)):
                missing.append(word)
    assert not missing, missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_make_targets(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {t for span in spans(document.read_text()) for t in re.findall(r"(?:^|[\s;&])make ([a-z]+)", span)}
    assert named <= targets, named - targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands(document: Path) -> None:
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} is not built: commands in documents are not checked")
    listed = subprocess.run([PROGRAM, "help"], capture_output=True, text=True, check=True).stdout
    commands = set(re.findall(r"^  ([a-z]+) ", listed, re.M))
    named = set()
    for span in spans(document.read_text()):
        named |= set(re.findall(r"(?:^|[$(|&;] ?)corral (?:--?[\w-]+ )*([a-z]+)\b", span))
    assert named <= commands | {"gateway", "node"}, named - commands


def test_promises_name_tests_that_exist() -> None:
    """Rows of SPEC.md name tests by file and function, and figures by the names the bench gives them."""
    text = (ROOT / "SPEC.md").read_text()
    missing = []
    for path, function in re.findall(r"`([\w./-]+\.(?:rs|py))::(\w+)`", text):
        file = ROOT / path
        if not file.exists() or not re.search(rf"\b(?:fn|def) {function}\b", file.read_text()):
            missing.append(f"{path}::{function}")
    figures = (ROOT / "bench" / "results.py").read_text()
    missing += [name for name in re.findall(r"bench `(\w+)`", text) if f'"{name}"' not in figures]
    assert not missing, missing


def test_routes() -> None:
    """Each public route of docs/routes.md is in the API document, and the other way round."""
    document = json.loads((ROOT / "openapi" / "corral.json").read_text())
    text = (ROOT / "docs" / "routes.md").read_text()
    public = text.split("## Between gateway and node")[0]
    for path in document["paths"]:
        tail = path.removeprefix("/v1/sandboxes/{id}")
        assert (tail or path) in public or path in public, f"{path} is not documented"
    for path in re.findall(r"`(?:[A-Z]+ )?(/v1/[^`?\s\[]+)", public):
        assert any(known.startswith(path.split("[")[0]) for known in document["paths"]), f"{path} does not exist"


def test_help_names_every_target() -> None:
    text = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("setup", "programs", "build", "demo", "test", "quick", "bench", "clean"):
        assert f"make {target}" in text
