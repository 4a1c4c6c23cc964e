#!/bin/bash
# tools/cuda/build.sh [--ci]: compiles and links for CUDA what a machine with a GPU runs: the program, the libraries, the
# benchmarks and the tests with the tag "gpu", but not the other tests. It needs nvcc, but no GPU. Used by .ci/run.
# The last line is "N passed, N failed", which counts the build as one (or each target that failed), each CUDA source that
# must have been compiled as one, and whether the program has PTX for GPUs newer than those it was compiled for.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. tools/arguments.sh
refuse_empty_arguments "tools/cuda/build.sh" "$@"
live_elsewhere=plain
. tools/live.sh

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

bazel query --noshow_progress 'attr(testonly, 0, //...) + attr(tags, "\bgpu\b", tests(//...))' >"$work/targets" 2>"$work/log" ||
  { cat "$work/log" >&2 && echo "0 passed, 1 failed" && exit 1; }
bazel build --config=cuda --target_pattern_file="$work/targets" --keep_going --curses=no --color=no --show_progress_rate_limit=0.3 \
  --build_event_json_file="$work/events.json" 2>&1 | follow_bazel "$work/log"
rc=$?
((rc == 8 || rc == 130)) && exit 130
compiler_messages "$work/log" >"$work/said"
tools/test_report.py --build --bazel-exit=$rc --said="$work/said" "$@" "$work/events.json" >"$work/report" || true
sed '$d' "$work/report"
read -r passed _ failed _ < <(tail -n 1 "$work/report")

# A build that left out CUDA code must not count as good, so every .cu file and the NCCL backend must have been
# compiled.
bazel aquery --config=cuda --output=text --noshow_progress --include_artifacts --noinclude_commandline \
  "mnemonic('CudaCompile|CppCompile', set($(tr '\n' ' ' <"$work/targets")))" >"$work/actions" 2>"$work/aquery" || cat "$work/aquery" >&2
wanted=(comm/nccl/nccl_{communicator,factory,handle}.cc)
mapfile -t -O ${#wanted[@]} wanted < <(find . \( -name '.?*' -o -name 'bazel-*' \) -prune -o -name '*.cu' -printf '%P\n' | sort)
for source in "${wanted[@]}"; do
  # The object file of a source is among the outputs of the action that reads the source.
  object=$(grep -F "$source" -A 1 "$work/actions" | grep -oE 'bazel-out/[^] ,]*\.o\b' | head -n 1)
  if [[ $object && -s $(bazel info --noshow_progress execution_root 2>/dev/null)/$object ]]; then
    ((++passed))
  else
    echo "FAILED: the CUDA build did not compile $source"
    ((++failed))
  fi
done
echo "compiled for CUDA: ${wanted[*]}"
archs=$(tools/cuda/fatbin_archs.py .bazel/bin/launcher/annulus)
echo "the program has code for: $archs"
if [[ " $archs " == *" sm_80 "* && " $archs " == *" compute_"* ]]; then
  ((++passed))
else
  echo "FAILED: expected sm_80 and PTX (compute_80) in the program, so that it also runs on GPUs newer than 9.0"
  ((++failed))
fi
echo "$passed passed, $failed failed"
((failed == 0))
