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
. tools/venv.sh

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
if ! hold .bazel/follower.lock && installed; then live_end && done_here; fi
make_environment .venv-follower 10 "TensorBoard's libraries are for Python"
lists=()
for list in "${wanted[@]}"; do lists+=(-r "$list"); done
install_into .venv-follower "the libraries of TensorBoard" "${lists[@]}"
for list in "${wanted[@]}"; do
  cp "$list" ".venv-follower/${list##*/}.new"
  mv ".venv-follower/${list##*/}.new" ".venv-follower/${list##*/}"
done
done_here
