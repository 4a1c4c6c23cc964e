#!/bin/bash
# tools/fuzz.sh [--minutes N] [READER...]: lets clang's libFuzzer search for input that a reader of outside data
# (tests/fuzz/readers.cc; default: all) neither reads nor refuses, for N minutes each (default: 1), under the address and
# undefined-behaviour sanitizers. It begins with the kept inputs. What it finds is kept in .bazel/fuzz/found/READER; a
# small input that was wrong belongs into tests/fuzz/corpus/READER. The last line is "N passed, N failed".
# Needs Debian's clang-14 and libclang-rt-14-dev, and builds in .bazel/fuzz, apart from other builds.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
. tools/arguments.sh
refuse_empty_arguments "tools/fuzz.sh" "$@"

minutes=1 readers=()
while (($#)); do
  case $1 in
    --minutes)
      [[ ${2-} =~ ^[1-9][0-9]*$ ]] || { echo "tools/fuzz.sh: --minutes needs a number of minutes, from 1" >&2; exit 2; }
      minutes=$2
      shift 2
      ;;
    -*) echo "tools/fuzz.sh: there is no option $1: [--minutes N] [READER...]" >&2; exit 2 ;;
    *)
      [[ -d tests/fuzz/corpus/$1 ]] || { echo "tools/fuzz.sh: there is no reader $1; there are: $(ls tests/fuzz/corpus | tr '\n' ' ')" >&2; exit 2; }
      readers+=("$1")
      shift
      ;;
  esac
done
((${#readers[@]})) || mapfile -t readers < <(ls tests/fuzz/corpus)
command -v clang++-14 >/dev/null || { echo "tools/fuzz.sh: needs clang++-14: apt-get install clang-14 libclang-rt-14-dev" >&2; exit 2; }

mkdir -p .bazel/fuzz
base=$PWD/.bazel/fuzz/base
bazel --output_base="$base" build --repo_env=CC=clang-14 --config=san --symlink_prefix=/ --copt=-Wno-error --copt=-Wno-unknown-warning-option \
  --copt=-fsanitize=fuzzer-no-link,address,undefined --linkopt=-fsanitize=address,undefined \
  --copt=-fno-sanitize=function,vptr --copt=-fno-sanitize-recover=undefined //tests/fuzz:libfuzzer || exit
program=$(bazel --output_base="$base" info bazel-bin --repo_env=CC=clang-14 --config=san --symlink_prefix=/ 2>/dev/null)/tests/fuzz/libfuzzer

passed=0 failed=0
for reader in "${readers[@]}"; do
  work=.bazel/fuzz/$reader found=.bazel/fuzz/found/$reader
  mkdir -p "$work" "$found"
  # A reader that leaks would be found here too, but for what LibTorch and MPI keep (.bazelrc, detect_leaks).
  ASAN_OPTIONS=detect_leaks=0:detect_container_overflow=0:allocator_may_return_null=1 ANNULUS_FUZZ_READER=$reader \
    "$program" -max_total_time=$((60 * minutes)) -timeout=20 -rss_limit_mb=4096 -print_final_stats=1 \
    -artifact_prefix="$found/" "$work" "tests/fuzz/corpus/$reader" >"$work.log" 2>&1
  rc=$?
  echo "$reader: $(sed -n 's/^stat::number_of_executed_units: *//p' "$work.log") executions$( ((rc == 0)) || echo ", FAILED: $work.log, $found")"
  if ((rc == 0)); then ((++passed)); else ((++failed)); fi
done
echo "$passed passed, $failed failed"
((failed == 0))
