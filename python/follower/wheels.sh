#!/bin/bash
# python/follower/wheels.sh [--wandb] [--python]: installs the libraries that carry metrics to TensorBoard (PyPI wheels,
# python/follower/requirements.txt) into .venv-follower, apart from .venv, whose versions of the same packages others depend
# on. --wandb installs also those of Weights & Biases. --python prints the Python that has them.
# ./annulus calls it when they are first needed, and tools/setup.sh for tests. Training never needs them.
# Exit code 9: they could not be installed; 8: this folder cannot be written. The message says what to do.
# It uses the variable PYTHON (for .venv-follower).
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. tools/arguments.sh
refuse_empty_arguments "python/follower/wheels.sh" "$@"
print='' wanted=(python/follower/requirements.txt)
for word; do
  case $word in
    --wandb) wanted+=(python/follower/requirements-wandb.txt) ;;
    --python) print=1 ;;
    *) echo "usage: python/follower/wheels.sh [--wandb] [--python]" >&2 && exit 2 ;;
  esac
done
. tools/live.sh

# Each list that is installed lies in the environment as a copy, so that it disappears with the libraries.
installed() {
  local list
  [[ -x .venv-follower/bin/python ]] || return 1
  for list in "${wanted[@]}"; do cmp -s "$list" ".venv-follower/${list##*/}" || return 1; done
}
done_here() {
  [[ ! $print ]] || echo "$PWD/.venv-follower/bin/python"
  exit 0
}
if installed; then done_here; fi
if cannot_build "$PWD"; then refuse_to_build "$PWD"; fi
fail() { live_end && printf '%s\n' "$@" >&2 && exit 9; }

mkdir -p .bazel
exec 9>.bazel/follower.lock
if ! flock -n 9; then
  live "set-up  waiting for another set-up in this folder to end"
  flock 9
  if installed; then live_end && done_here; fi
fi
if [[ ! -x .venv-follower/bin/python ]]; then
  python=''
  for p in ${PYTHON:-/usr/bin/python3 python3}; do
    if "$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      python=$p
      break
    fi
  done
  [[ $python ]] || fail "TensorBoard's libraries are for Python, and ${PYTHON:-python3} is not of version 3.10 or newer with venv and" \
    "ensurepip. Install it (apt-get install python3-venv), or name another in PYTHON."
  "$python" -m venv .venv-follower 9>&- >&2 || fail "Could not make .venv-follower with $python."
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
live "set-up  libraries of TensorBoard: downloading"
pip=(.venv-follower/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-deps)
for list in "${wanted[@]}"; do pip+=(-r "$list"); done
if ! "${pip[@]}" >"$log" 2>&1 </dev/null 9>&-; then
  live_end
  { grep '^ERROR' "$log" || tail -n 5 "$log"; } | tail -n 3 >&2
  fail "Could not install the libraries of TensorBoard. The command was (in $PWD):" "  ${pip[*]}"
fi
live_end
for list in "${wanted[@]}"; do
  cp "$list" ".venv-follower/${list##*/}.new"
  mv ".venv-follower/${list##*/}.new" ".venv-follower/${list##*/}"
done
done_here
