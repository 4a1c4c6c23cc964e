#!/bin/bash
# ./annulus torch: builds the library that registers torch.ops.annulus and prints its path, for ANNULUS_TORCH_LIBRARY or
# torch.ops.load_library. It is built against LIBTORCH, which must be the torch of the Python that loads it:
#   LIBTORCH=$(python3 -c 'import torch; print(torch.__path__[0])') ./annulus torch
# Without LIBTORCH it is the one that annulus installed for itself. The last line on standard error says which it was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1-} in
  '') ;;
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' tools/torch_library.sh && exit 0 ;;
  *) echo "./annulus torch takes no arguments, got: $*" >&2 && exit 2 ;;
esac
tools/setup.sh
. tools/live.sh
log=$(mktemp)
trap 'rm -f "$log"' EXIT
rc=0
bazel build --curses=no --color=no --show_progress_rate_limit=0.3 //torch_ops:libannulus_torch.so 2>&1 |
  follow_bazel "$log" || rc=$?
if ((rc == 8 || rc == 130)); then exit 130; fi # Ctrl-C
if ((rc)); then
  compiler_messages "$log" >&2
  echo "annulus: the build failed (above: what the compiler said)" >&2
  exit 1
fi
echo "annulus: built against the torch in $(realpath -s "$(sed -n 's|^found \(.*\)/lib/libtorch_cpu.so$|\1|p' .bazel/setup)")" >&2
readlink -f .bazel/bin/torch_ops/libannulus_torch.so
