#!/usr/bin/env bash
# The demo: a hundred sandboxes that run a real project's test suite.
source "$(dirname "$0")/lib.sh"
[[ $EUID == 0 ]] || fail "the demo starts a node: run as root"

CORRAL_BIN=$root/target/libexec/corral CORRAL_LIBEXEC=$root/target/libexec exec .venv/bin/python demo/demo.py "$@"
