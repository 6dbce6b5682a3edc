#!/usr/bin/env bash
# The checks that need no privileges and no running node: formatting, lints, types, unit tests of the SDK.
source "$(dirname "$0")/lib.sh"
python=$root/.venv/bin/python

say "rustfmt"
cargo fmt --all --check
say "clippy"
cargo clippy --workspace --all-targets --quiet -- -D warnings
say "ruff"
$python -m ruff check --quiet sdk/python tests demo bench
$python -m ruff format --quiet --check sdk/python tests demo bench
say "mypy"
(cd sdk/python && $python -m mypy)
$python -m mypy --config-file tests/mypy.ini tests demo
(cd bench && $root/.venv/bin/python -m mypy --strict run.py soak.py)
say "unit tests of the SDK"
(cd sdk/python && $python -m pytest -q)
say "documents"
$python -m pytest -q -p no:cacheprovider tests/test_documents.py
