#!/usr/bin/env bash
# Installs what is missing to build and test Corral on Debian: packages, the Python environment, the SDK.
source "$(dirname "$0")/lib.sh"

packages=(
  btrfs-progs        # the space for writable layers
  erofs-utils        # mkfs.erofs, against which the bench reads
  busybox-static     # small images of the tests
  mmdebstrap         # Debian base images of the demo and the tests
  skopeo docker-registry  # the tests import from a real registry
  buildah            # the tests compare builds with its own
  docker.io          # the tests load exports into it, the bench measures against it
  zstd               # the tests send compressed contexts
  gcc g++ libc6-dev make cmake pkg-config perl  # C code in Rust dependencies
  python3-venv ca-certificates
)

if command -v dpkg-query >/dev/null; then
  missing=()
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$' || missing+=("$package")
  done
  if ((${#missing[@]})); then
    [[ $EUID == 0 ]] || fail "missing packages: ${missing[*]}; run as root, or: sudo apt-get install ${missing[*]}"
    say "installing ${missing[*]}"
    apt-get update -qq
    # Services are started by what needs them.
    policy=/usr/sbin/policy-rc.d
    if [[ ! -e $policy ]]; then
      printf '#!/bin/sh\nexit 101\n' >"$policy"
      chmod 755 "$policy"
      trap 'rm -f "$policy"' EXIT
    fi
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  fi
else
  for program in mkfs.btrfs gcc make python3; do
    command -v "$program" >/dev/null || fail "$program is missing: install it with this system's package manager"
  done
fi

command -v cargo >/dev/null || fail "cargo is missing: install Rust 1.95 or later (https://rustup.rs), then run make setup again"
need=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
have=$(cargo --version | cut -d' ' -f2)
[[ $(printf '%s\n%s\n' "$need" "$have" | sort -V | head -1) == "$need" ]] || fail "cargo is $have: Rust $need or later is needed"

stamp=.venv/.ready
if [[ ! -e $stamp || requirements-dev.txt -nt $stamp || sdk/python/pyproject.toml -nt $stamp ]]; then
  say "preparing the Python environment in .venv"
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "Python 3.10 or later is needed"
  [[ -x .venv/bin/python ]] || python3 -m venv .venv
  .venv/bin/python -m pip install -q --disable-pip-version-check -r requirements-dev.txt
  .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e sdk/python
  touch "$stamp"
fi
say "everything is set up"
