#!/usr/bin/env bash
# Builds `corral` in release mode and puts it beside the programs it starts.
source "$(dirname "$0")/lib.sh"

scripts/programs.sh
say "building corral (minutes the first time)"
build --release -p corral -p corral-lazy
install -D -m 0755 -t target/libexec "${CARGO_TARGET_DIR:-target}"/release/corral{,-lazy}
say "built target/libexec/corral"
