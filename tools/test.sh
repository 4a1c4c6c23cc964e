#!/bin/bash
# ./annulus test [--all] [BAZEL OPTIONS] [TARGETS]: sets up, builds and runs tests; the last line is "N passed, N failed".
#   --all     --sweeps, then --nudged
#   --sweeps  also the long sweeps (targets tagged "sweep")
#   --numeric  only tests that compute numbers (targets tagged "numeric")
#   --nudged  the numeric ones again and again: limited to each lesser set of vector instructions that this processor has, drawing
#             other numbers, and with several threads. What they promise must not depend on any of this
#   TARGETS   as Bazel names them (//tests/attention/..., //tests/comm:threads_test), or a folder (tests/attention);
#             without any: all
#   --mutants [NAME...]  checks that tests are able to fail: plants the faults of tests/mutants, one after the other, in
#             a copy of the tree, and expects the test named in each to fail (--list shows them)
#   --ci      a test that needed a second attempt, and a target skipped because a library is missing, is a failure
# ANNULUS_ISA=avx2 limits the vector instructions of the tests, too.
# For example: ./annulus test --config=asan //tests/...      ./annulus test --test_filter='Span.*' tests/attention
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/arguments.sh
refuse_empty_arguments "annulus: test" "$@"

all='' ci=() targets=() options=() named='' show='' mutants='' numeric='' nudged='' sweeps='' again=()
for arg; do
  [[ $arg == --all || $arg == --nudged ]] || again+=("$arg")
  case $arg in
    --all) all=1 nudged=1 ;;
    --numeric) numeric=1 ;;
    --nudged) nudged=1 ;;
    --sweeps) sweeps=1 ;;
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

passed=0 failed=0
add_up() { # TITLE COMMAND...: runs ./annulus test, adds what its last line says, and prints the rest below the title
  local said
  printf -- '\n-- %s\n' "$1"
  said=$("${@:2}") || true
  printf '%s\n' "$said"
  add_counts "${said##*$'\n'}" 0 # a run without tests is no failure here
}
if [[ $nudged ]]; then
  trap 'exit 130' INT
  again=(./annulus test ${again[@]+"${again[@]}"})
  [[ ! $all ]] || add_up "all tests" "${again[@]}" --sweeps
  again+=(--numeric)
  has() { grep -qm 1 "^flags.*\b$1\b" /proc/cpuinfo; }
  ! has avx512bw || add_up "limited to AVX2" env ANNULUS_ISA=avx2 "${again[@]}"
  ! has amx_bf16 && ! has avx512_bf16 || add_up "limited to AVX-512" env ANNULUS_ISA=avx512 "${again[@]}"
  ! has avx2 || add_up "limited to SSE4" env ANNULUS_ISA=baseline "${again[@]}"
  add_up "other numbers" "${again[@]}" --test_env=GTEST_RANDOM_SEED=4711 --test_env=RC_PARAMS=seed=4711
  # Threads that wait for work must not take the cores from those that have some.
  add_up "three threads" "${again[@]}" --test_env=OMP_NUM_THREADS=3 --test_env=OMP_WAIT_POLICY=passive
  echo "$passed passed, $failed failed"
  ((failed == 0))
  exit
fi
((${#targets[@]})) || targets=(//...)
# A target that is given by name runs, whatever its tags.
filter=() built=()
[[ $sweeps || $named ]] || filter+=(-sweep)
# Those that name a set of vector instructions themselves (bazel/test_unit.bzl) would run as before.
[[ ! $numeric ]] || filter+=(numeric -isa)
if ((${#filter[@]})); then
  filter=$(IFS=, && echo "${filter[*]}")
  options=("--test_tag_filters=$filter" ${options[@]+"${options[@]}"})
  built=("--build_tag_filters=$filter")
fi
# What limits vector instructions: ./annulus sets these variables by ANNULUS_ISA.
if [[ ${ANNULUS_ISA-} ]]; then
  for variable in ANNULUS_ISA ATEN_CPU_CAPABILITY MKL_ENABLE_INSTRUCTIONS ONEDNN_MAX_CPU_ISA; do
    options+=("--test_env=$variable")
  done
fi

tools/setup.sh --tests
live_elsewhere=plain
. tools/live.sh
grep -qx 'cuda 1' .bazel/setup && options=(--config=cuda ${options[@]+"${options[@]}"})

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
run_bazel() { # LOG SHOW COMMAND...: sets rc, and exits after Ctrl-C
  rc=0
  bazel "${@:3}" --keep_going --curses=no --color=no --show_progress_rate_limit=0.3 --test_output=summary \
    ${options[@]+"${options[@]}"} -- "${targets[@]}" 2>&1 | follow_bazel "$work/$1" "$2" || rc=$?
  ((rc == 8 || rc == 130)) || return 0
  echo "tests: interrupted" >&2
  exit 130
}
# As many compilers at a time as tests (.bazelrc) take a fifth more CPU seconds than one for each core, so all is built
# first. What fails to build here fails again and is reported below.
run_bazel built '' build ${built[@]+"${built[@]}"}
run_bazel log "$show" test --build_event_json_file="$work/events.json"
compiler_messages "$work/log" >"$work/said"
tools/test_report.py --bazel-exit=$rc --said="$work/said" ${ci[@]+"${ci[@]}"} "$work/events.json"
