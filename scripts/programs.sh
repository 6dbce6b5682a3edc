#!/usr/bin/env bash
# Builds the static programs that the node starts, and puts them into target/libexec.
source "$(dirname "$0")/lib.sh"

say "building the keeper, the first process and the file worker (static)"
target=x86_64-unknown-linux-gnu
static="-C target-feature=+crt-static -C relocation-model=static -C strip=symbols"
RUSTFLAGS=$static build --release -p corral-keeper -p corral-guest --bins \
  --target $target --target-dir target/static
# The first process has neither library nor unwinding; in a directory of its own, so that neither build undoes the other.
RUSTFLAGS="$static -C panic=abort" build --release -p corral-sys --features init --bin corral-init \
  --target $target --target-dir target/static-init
install -D -m 0755 -t target/libexec target/static/$target/release/corral-{keeper,guest} \
  target/static-init/$target/release/corral-init
