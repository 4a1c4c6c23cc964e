# shellcheck shell=bash
# Sourced, after live.sh, by the scripts that install wheels from PyPI into an environment of their own: tools/setup.sh,
# tools/tokenizer_wheels.sh, tools/site_wheels.sh and python/follower/wheels.sh.

# Exit code 9: something could not be installed. The message says what to do.
fail() { live_end && printf '%s\n' "$@" >&2 && exit 9; }

# Prints a Python of version 3.MINOR or newer that can make an environment: PYTHON, the system's, or the first on PATH.
find_python() { # MINOR
  local p
  for p in ${PYTHON:-/usr/bin/python3 python3}; do
    "$p" -c "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, $1))" 2>/dev/null && echo "$p" && return
  done
  return 1
}

# Waits until no other script holds FILE, and holds it until this one ends. Returns 1 if it had to wait: what the other one
# installed may be all that is needed.
hold() { # FILE
  mkdir -p .bazel && exec 9>"$1" || fail "Could not make $1."  # callers test this, which switches set -e off
  flock -n 9 && return
  live "set-up  waiting for another set-up in this folder to end"
  flock 9
  return 1
}

# Makes the environment FOLDER if it is not there.
make_environment() { # FOLDER MINOR WHAT-IT-IS-FOR
  [[ ! -x $1/bin/python ]] || return 0
  local python
  python=$(find_python "$2") || fail "$3, and ${PYTHON:-python3} is not of version 3.$2 or newer with" \
    "venv and ensurepip. Install it (apt-get install python3-venv), or name another in PYTHON."
  # 9>&-: no process that is started here may keep the lock.
  "$python" -m venv "$1" 9>&- >&2 || fail "Could not make $1 with $python."
}

# Installs wheels into the environment FOLDER. --no-deps, because the lists name all that is needed.
install_into() { # FOLDER WHAT WHEELS-OR-OPTIONS...
  local pip=("$1/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-deps "${@:3}")
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  live "set-up  $2: downloading"
  if ! "${pip[@]}" >"$log" 2>&1 </dev/null 9>&-; then
    live_end
    { grep '^ERROR' "$log" || tail -n 5 "$log"; } | tail -n 3 >&2
    fail "Could not install $2. The command was (in $PWD):" "  ${pip[*]}"
  fi
  live_end
}
