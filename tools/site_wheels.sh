#!/bin/bash
# tools/site_wheels.sh: installs Sphinx and what it needs (PyPI wheels, docs/site/requirements.txt) into .venv-docs, apart from
# .venv, whose versions of the same packages tests depend on. Called by tools/setup.sh --docs; nothing else needs them.
# Exit code 9: they could not be installed; the message says what to do. It uses the variable PYTHON.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/live.sh
mark=.venv-docs/.installed
if cmp -s docs/site/requirements.txt "$mark"; then exit 0; fi
fail() { live_end && printf '%s\n' "$@" >&2 && exit 9; }
python=''
for p in ${PYTHON:-/usr/bin/python3 python3}; do
  if "$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$p
    break
  fi
done
[[ $python ]] || fail "The site is built by Sphinx, and ${PYTHON:-python3} is not of version 3.11 or newer with venv and ensurepip." \
  "Install it (apt-get install python3-venv), or name another in PYTHON."
live "set-up  Sphinx: downloading"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
pip=(.venv-docs/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-deps -r docs/site/requirements.txt)
if ! { "$python" -m venv --clear .venv-docs && "${pip[@]}"; } >"$log" 2>&1 </dev/null; then
  live_end
  tail -n 3 "$log" >&2
  fail "Could not install Sphinx. The command was (in $PWD):" "  ${pip[*]}"
fi
live_end
cp docs/site/requirements.txt "$mark"
