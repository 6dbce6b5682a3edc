#!/usr/bin/env bash
# What can be checked without root in a few minutes: all checks, and the unit tests of the crates.
source "$(dirname "$0")/lib.sh"

scripts/check.sh
say "unit tests of the crates"
cargo test --workspace --lib --bins --quiet
