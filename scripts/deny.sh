#!/usr/bin/env bash
# What dependencies may bring (deny.toml). Advisories need their database from the network: ADVISORIES=1 checks them too.
source "$(dirname "$0")/lib.sh"
version=0.20.2
tool=target/tools/bin/cargo-deny

if [[ $("$tool" --version 2>/dev/null) != "cargo-deny $version" ]]; then
  say "building cargo-deny $version (some minutes)"
  cargo install --quiet --locked --debug --version "$version" --root target/tools cargo-deny
fi
say "licences, bans and sources"
"$tool" check licenses bans sources ${ADVISORIES:+advisories}
