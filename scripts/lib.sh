# Shared by the scripts of this directory: where the repository is, and how they speak.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export DEBIAN_FRONTEND=noninteractive

if [[ -t 1 && -z ${NO_COLOR:-} ]]; then bold=$'\033[1m' plain=$'\033[0m'; else bold='' plain=''; fi
say() { printf '%s==> %s%s\n' "$bold" "$*" "$plain"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Builds with cargo, which takes minutes the first time: with cargo's own progress on a terminal, elsewhere with a line
# now and then. Warnings and errors are always shown.
build() {
  if [[ -t 2 ]]; then
    cargo build "$@"
    return
  fi
  cargo build "$@" 2>&1 | summary >&2
}

# Passes on what cargo says but for its progress, of which it tells every 15 seconds how far it is.
summary() {
  local line='' crates=0 last='' next=$((SECONDS + 15)) status
  while true; do
    # The time limit keeps the line of a pause coming; what was read of an unfinished line stays in it.
    IFS= read -r -t 1 part && status=0 || status=$?
    line+=$part
    if ((status == 0)); then
      case $line in
        '   Compiling '*) crates=$((crates + 1)) last=${line#   Compiling } ;;
        *'Blocking waiting for '*) last='another build to end' ;;
        '    Finished '* | '  Downloaded '* | ' Downloading '* | '    Updating '* | '     Locking '*) ;;
        *) printf '%s\n' "$line" ;;
      esac
      line=''
    elif ((status <= 128)); then
      # The end of what cargo says.
      [[ -z $line ]] || printf '%s\n' "$line"
      return
    fi
    if ((SECONDS >= next)); then
      printf '    %d crates begun, last %s\n' "$crates" "${last%% (*}"
      next=$((SECONDS + 15))
    fi
  done
}
