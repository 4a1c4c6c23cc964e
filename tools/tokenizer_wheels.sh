#!/bin/bash
# tools/tokenizer_wheels.sh [--python]: installs the libraries that turn text into tokens (PyPI wheels) into .venv. It
# makes .venv if that does not exist because LIBTORCH names a LibTorch elsewhere. --python prints the Python that has
# them.
# ./annulus calls it when tokens are first made, and tools/setup.sh for tests. No training job needs them.
# Exit code 9: they could not be installed; 8: this folder cannot be written. The message says what to do.
# It uses the variable PYTHON (for the .venv).
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/arguments.sh
refuse_empty_arguments "tools/tokenizer_wheels.sh" "$@"

wheels=(tokenizers==0.23.3 sentencepiece==0.2.3 pyarrow==26.0.1 zstandard==0.25.0 xxhash==4.1.0)
case ${1-} in
  '' | --python) ;;
  *) echo "usage: tools/tokenizer_wheels.sh [--python]" >&2 && exit 2 ;;
esac
. tools/live.sh

# The mark is in .venv, so that it disappears with the libraries when .venv is made again.
mark=.venv/.tokenizer_wheels
there() { [[ ! -e .venv/.incomplete && -x .venv/bin/python && -r $mark && $(<"$mark") == "${wheels[*]}" ]]; }
done_here() {
  [[ ${1-} != --python ]] || echo "$PWD/.venv/bin/python"
  exit 0
}
if there; then done_here "$@"; fi
if cannot_build "$PWD"; then refuse_to_build "$PWD"; fi

fail() { live_end && printf '%s\n' "$@" >&2 && exit 9; }

mkdir -p .bazel
exec 9>.bazel/setup.lock
if ! flock -n 9; then
  live "set-up  waiting for another set-up in this folder to end"
  flock 9
  if there; then live_end && done_here "$@"; fi
fi
if [[ -e .venv/.incomplete ]]; then
  fail "The set-up in $PWD was interrupted: ./annulus setup finishes it. Then repeat your command."
fi
if [[ ! -x .venv/bin/python ]]; then
  python=''
  for p in ${PYTHON:-/usr/bin/python3 python3}; do
    if "$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      python=$p
      break
    fi
  done
  [[ $python ]] || fail "Tokens are made by libraries for Python, and ${PYTHON:-python3} is not of version 3.10 or newer with" \
    "venv and ensurepip. Install it (apt-get install python3-venv), or name another in PYTHON."
  "$python" -m venv .venv 9>&- >&2 || fail "Could not make .venv with $python."
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
live "set-up  tokenizer libraries: downloading"
# --no-deps, because their dependencies are only needed to download tokenizers.
pip=(.venv/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-deps)
if ! "${pip[@]}" "${wheels[@]}" >"$log" 2>&1 </dev/null 9>&-; then
  live_end
  { grep '^ERROR' "$log" || tail -n 5 "$log"; } | tail -n 3 >&2
  fail "Could not install the tokenizer libraries. The command was (in $PWD):" "  ${pip[*]} ${wheels[*]}"
fi
live_end
printf '%s\n' "${wheels[*]}" >"$mark.new"
mv "$mark.new" "$mark"
done_here "$@"
