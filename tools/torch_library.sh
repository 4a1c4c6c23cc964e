#!/bin/bash
# ./annulus torch: builds the library that registers torch.ops.annulus and prints its path, for ANNULUS_TORCH_LIBRARY or
# torch.ops.load_library. It is built against LIBTORCH, which must be the torch of the Python that loads it:
#   LIBTORCH=$(python3 -c 'import torch; print(torch.__path__[0])') ./annulus torch
# Without LIBTORCH it is built against the torch that annulus installed for itself, and .venv/bin/python is made ready to
# load it: PYTHONPATH=python .venv/bin/python. What is said about that goes to standard error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/arguments.sh
refuse_arguments torch "$@"
if [[ ${LIBTORCH+set} ]]; then
  tools/setup.sh
else
  tools/setup.sh --tests # with the Python packages that torch imports
fi
. tools/live.sh
build_or_exit //python/ops:libannulus_torch.so
torch=$(realpath -s "$(sed -n 's|^found \(.*\)/lib/libtorch_cpu.so$|\1|p' .bazel/setup)")
echo "annulus: built against the torch in $torch" >&2
if [[ ! ${LIBTORCH+set} ]]; then
  .venv/bin/python -B tools/cuda_stubs.py --beside "$torch/lib"
  printf 'annulus: a Python that loads it: PYTHONPATH=%q %q\n' "$PWD/python" "$PWD/.venv/bin/python" >&2
fi
readlink -f .bazel/bin/python/ops/libannulus_torch.so
