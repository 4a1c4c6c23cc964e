#!/bin/bash
# ./annulus test [--all] [BAZEL OPTIONS] [TARGETS]: sets up, builds and runs tests; the last line is "N passed, N failed".
#   --all     also the long sweeps (targets tagged "sweep")
#   TARGETS   as Bazel names them (//tests/attention/..., //tests/comm:threads_test), or a folder (tests/attention);
#             without any: all
#   --mutants [NAME...]  checks that tests are able to fail: plants the faults of tests/mutants, one after the other, in
#             a copy of the tree, and expects the test named in each to fail (--list shows them)
#   --ci      a test that needed a second attempt, and a target skipped because a library is missing, is a failure
# For example: ./annulus test --config=asan //tests/...      ./annulus test --test_filter='Span.*' tests/attention
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

all='' ci=() targets=() options=() named='' show='' mutants=''
for arg; do
  case $arg in
    --all) all=1 ;;
    --mutants) mutants=1 ;;
    --ci) ci=(--ci) ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' tools/test.sh && exit 0 ;;
    --test_output=*) options+=("$arg") && [[ $arg == *=errors || $arg == *=summary ]] || show=show ;;
    //* | -//* | @* | :*)
      targets+=("$arg")
      [[ $arg == *... || $arg == *:all ]] || named=1
      ;;
    *)
      if [[ $arg != -* && -d ${arg%/...} ]]; then
        arg=${arg%/...} && targets+=("//${arg%/}/...")
      else
        options+=("$arg")
      fi
      ;;
  esac
done
if [[ $mutants ]]; then
  words=()
  for arg; do [[ $arg == --mutants ]] || words+=("$arg"); done
  if [[ " $* " != *" --list "* ]]; then
    tools/setup.sh --tests
    ! grep -qx 'cuda 1' .bazel/setup || words+=(--config=cuda)
  fi
  exec tools/mutants.py ${words[@]+"${words[@]}"}
fi
((${#targets[@]})) || targets=(//...)
# A target that is given by name runs, whatever its tags.
[[ $all || $named ]] || options=(--test_tag_filters=-sweep ${options[@]+"${options[@]}"})

tools/setup.sh --tests
. tools/live.sh
grep -qx 'cuda 1' .bazel/setup && options=(--config=cuda ${options[@]+"${options[@]}"})

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rc=0
bazel test --keep_going --curses=no --color=no --show_progress_rate_limit=0.3 --test_output=summary \
  --build_event_json_file="$work/events.json" ${options[@]+"${options[@]}"} -- "${targets[@]}" 2>&1 |
  follow_bazel "$work/log" $show || rc=$?
if ((rc == 8 || rc == 130)); then # Ctrl-C
  echo "tests: interrupted" >&2
  exit 130
fi
compiler_messages "$work/log" >"$work/said"
tools/test_report.py --bazel-exit=$rc --said="$work/said" ${ci[@]+"${ci[@]}"} "$work/events.json"
