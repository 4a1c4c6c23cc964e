#!/bin/bash
# tools/gpu_bundle.sh [OUT]: makes a folder with the GPU tests, the benchmarks and the program, to be copied to a
# machine that has only a GPU, its driver, Python and LibTorch: no Bazel, no MPI and no network
# (docs/internals/gpu-machines.md). Making it needs nvcc, but no GPU. OUT (default: .bazel/gpu-bundle) is replaced.
# tools/gpu_bundle.sh --ci: makes one in a temporary folder and tests it as far as a machine without a GPU can; the last
# line is "N passed, N failed".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/arguments.sh
refuse_empty_arguments "tools/gpu_bundle.sh" "$@"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
case ${1-} in
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' tools/gpu_bundle.sh && exit 0 ;;
  --ci)
    if ! tools/gpu_bundle.sh "$work/bundle"; then
      echo "FAILED: the bundle could not be made"
      echo "0 passed, 1 failed"
      exit 1
    fi
    tools/gpu_bundle/bundle_test.py "$work/bundle"
    exit
    ;;
  -*) echo "tools/gpu_bundle.sh: unknown option $1; see --help" >&2 && exit 2 ;;
esac

ANNULUS_CUDA=1 tools/setup.sh --tests
live_elsewhere=plain
. tools/live.sh
# Builds every test for GPUs, with the programs that these tests start, and the benchmarks.
tests='attr(tags, "\bgpu\b", tests(//...))'
for output in xml label; do
  bazel query --noshow_progress --output=$output "$tests" >"$work/tests.$output" 2>"$work/log" || { cat "$work/log" >&2 && exit 1; }
done
printf '%s\n' //launcher:annulus //benchmarks/program:annulus_bench >>"$work/tests.label"
rc=0
bazel build --config=cuda --curses=no --color=no --show_progress_rate_limit=0.3 --target_pattern_file="$work/tests.label" 2>&1 |
  follow_bazel "$work/log" || rc=$?
if ((rc == 8 || rc == 130)); then exit 130; fi # Ctrl-C
if ((rc)); then
  compiler_messages "$work/log" >&2
  echo "tools/gpu_bundle.sh: the build failed; the compiler's messages are above" >&2
  exit 1
fi
tools/gpu_bundle/collect.py "$work/tests.xml" .bazel/bin "${1:-.bazel/gpu-bundle}"
