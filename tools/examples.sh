#!/bin/bash
# ./annulus examples: builds examples/cpp and examples/testing as outside users would, with Bazel, runs their tests, and the
# program under mpirun. Then installs annulus to a temporary folder, and builds and tests examples/testing with CMake. The
# last line is "N passed, N failed". With --ci a missing CMake is a failure.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/arguments.sh
refuse_empty_arguments "annulus: examples" "$@"
ci=
case ${1-} in
  '') ;;
  --ci) ci=1 ;;
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' tools/examples.sh && exit 0 ;;
  *) echo "./annulus examples takes only --ci, got: $*" >&2 && exit 2 ;;
esac
tools/setup.sh --tests || exit
live_elsewhere=plain
. tools/live.sh
root=$PWD
cd examples/cpp || exit
work=$(mktemp -d)
# The example's workspace has its own Bazel server, which is stopped at the end.
trap 'rm -rf "$work" testing; bazel shutdown >"/dev/null" 2>&1' EXIT
rm -rf testing && cp -r ../testing testing || exit

rc=0
bazel test --curses=no --color=no --show_progress_rate_limit=0.3 --build_event_json_file="$work/events.json" \
  --keep_going //... 2>&1 | follow_bazel "$work/log" || rc=$?
if ((rc == 8 || rc == 130)); then exit 130; fi # Ctrl-C
compiler_messages "$work/log" >"$work/said"
"$root/tools/test_report.py" --ci --bazel-exit=$rc --said="$work/said" "$work/events.json" >"$work/report"
sed '$d' "$work/report"
passed=0 failed=0
add_counts "$(tail -n 1 "$work/report")" 0

as_root=()
((EUID)) || as_root=(--allow-run-as-root)
if mpirun "${as_root[@]}" --oversubscribe -n 4 .bazel/bin/attention --length=1000; then
  ((++passed))
else
  ((++failed))
  echo "FAILED examples/cpp: mpirun -n 4 .bazel/bin/attention --length=1000"
fi

rm -rf testing # an installation has the examples, too
torch=$(cd "$root" && realpath -s "$(sed -n 's|^found \(.*\)/lib/libtorch_cpu.so$|\1|p' .bazel/setup)")
if ! command -v cmake >/dev/null; then
  echo "SKIPPED examples/testing with CMake: no cmake"
  [[ ! $ci ]] || ((++failed))
elif "$root/tools/install.sh" "$work/annulus" && cmake -S ../testing -B "$work/build" -DCMAKE_PREFIX_PATH="$work/annulus" \
  -DLIBTORCH="$torch" && cmake --build "$work/build" -j 2 &&
  ctest --test-dir "$work/build" --output-on-failure; then
  ((++passed))
else
  ((++failed))
  echo "FAILED examples/testing with CMake"
fi
echo "$passed passed, $failed failed"
((failed == 0))
