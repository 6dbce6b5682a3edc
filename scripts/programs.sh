#!/usr/bin/env bash
# Builds the static programs that the node starts, and puts them into target/libexec.
source "$(dirname "$0")/lib.sh"

say "building the keeper and the guest (static)"
target=x86_64-unknown-linux-gnu
RUSTFLAGS="-C target-feature=+crt-static -C relocation-model=static -C strip=symbols" \
  cargo build --release --quiet -p corral-keeper -p corral-guest --bins --target $target --target-dir target/static
install -D -m 0755 -t target/libexec target/static/$target/release/corral-{keeper,guest}
