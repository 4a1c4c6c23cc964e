#!/bin/bash
# ./annulus wheel: builds a wheel of the package annulus for Python, with its library, and prints its path. pip installs it
# beside the torch of the same minor version, and nothing else is needed there: no compiler, no Bazel, no MPI. In a clone that
# was set up, `pip install .` and `pip wheel --no-deps .` do the same (tools/wheel/build_backend.py).
# It is built against the torch that tools/setup.sh installs, with the tools that `tools/setup.sh --tests` installs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/arguments.sh
refuse_arguments wheel "$@"
if [[ ${LIBTORCH+set} ]]; then
  echo "annulus: a wheel is built against the torch from PyPI that set-up installs, but LIBTORCH is set: unset it." \
    "To build against this machine's own torch, use ./annulus torch." >&2
  exit 2
fi
tools/setup.sh --tests
. tools/live.sh
build_or_exit //python/ops:libannulus_torch_wheel.so
torch=$(sed -n "s/^__version__ = '\(.*\)'/\1/p" .venv/lib/python3.*/site-packages/torch/version.py)
library=.bazel/bin/python/ops/libannulus_torch_wheel.so
readlink -f "$(.venv/bin/python tools/wheel/wheel.py --library "$library" --torch "$torch" --out .bazel/wheel)"
