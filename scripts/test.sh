#!/usr/bin/env bash
# All tests. As root: sandboxes are made for real.
source "$(dirname "$0")/lib.sh"
[[ $EUID == 0 ]] || fail "the tests make namespaces, mounts and cgroups: run as root (make quick runs the rest)"

scripts/check.sh
say "Rust tests"
if cargo nextest --version >/dev/null 2>&1; then
  cargo nextest run --workspace --no-fail-fast
else
  cargo test --workspace --quiet --no-fail-fast
fi
say "black-box tests"
CORRAL_BIN=$root/target/libexec/corral CORRAL_LIBEXEC=$root/target/libexec .venv/bin/python -m pytest tests "$@"
