"""Every example and every piece of Python in the documents runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import corral
from support import ROOT, Server

EXAMPLES = sorted((ROOT / "sdk" / "python" / "examples").iterdir())
DOCUMENTS = [ROOT / "README.md", ROOT / "sdk" / "python" / "README.md"]
PRINTED = [
    pytest.param(text, id=f"{file.parent.name}-{file.name}-{n}")
    for file in DOCUMENTS
    for n, text in enumerate(re.findall(r"^```python\n(.*?)^```", file.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.fixture(scope="module")
def python(client: corral.Client, debian: str) -> Iterator[None]:
    """The environment that examples use when they are given none."""
    client.environments.put("python", corral.EnvironmentSpec(base=debian))
    yield
    client.environments.delete("python")


def run(server: Server, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env=server.environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.name)
@pytest.mark.usefixtures("python")
def test_examples_run(server: Server, example: Path) -> None:
    done = run(server, str(example))
    assert done.returncode == 0, done
    assert done.stdout, "it says what it did"


@pytest.mark.parametrize("text", PRINTED)
@pytest.mark.usefixtures("python")
def test_python_in_documents_runs(server: Server, text: str) -> None:
    done = run(server, "-c", text)
    assert done.returncode == 0, done
    assert "42" in done.stdout or "Python 3" in done.stdout, done
