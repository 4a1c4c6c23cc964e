#!/bin/bash
# tools/setup.sh [--full]: installs what the build needs; does nothing, quickly, when all is there.
#   - missing Debian/Ubuntu packages (as root or through sudo; otherwise prints the command to run)
#   - .venv with LibTorch's wheel and only what linking and running it on CPUs needs
#   --full: the wheel with all its dependencies (4 GB): to run on GPUs, or to `import torch` in Python.
# PYTHON chooses the interpreter of the .venv (default: /usr/bin/python3).
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(
  bazel-bootstrap bazel-rules-java g++ pkg-config python3 python3-venv
  openmpi-bin libopenmpi-dev libhwloc-dev libnuma-dev libspdlog-dev libfmt-dev libcli11-dev
  nlohmann-json3-dev libxxhash-dev libtomlplusplus-dev
  libgtest-dev libgmock-dev libbenchmark-dev librapidcheck-dev
  clang-format-14 clang-tidy-14 iproute2 util-linux procps
)
[[ -n ${CI-} ]] && packages+=(slurmctld slurmd slurm-client) # tests/slurm_test.sh skips itself without
command -v bazel >/dev/null && packages=("${packages[@]:2}") # an upstream Bazel will do

wheels=(
  torch==2.11.0 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85 # libtorch_cpu.so needs these two
  nvidia-nccl-cu13==2.28.9                                              # the NCCL that libtorch_cuda.so loads
  nvidia-cudnn-frontend==1.18.0 nvidia-cutlass==4.2.0.0                 # C++ headers (cudnn_frontend; CUTLASS, CuTe)
)
want="${wheels[*]}"
[[ ${1-} == --full || ( -f .venv/.stamp && $(<.venv/.stamp) == "full $want" ) ]] && want="full $want"

say() { echo "setup: $*" >&2; }

# dpkg-query fails when it does not know one of the names: only its lines count.
installed() { dpkg-query -W -f '${db:Status-Abbrev} ${Package}\n' "${packages[@]}" 2>/dev/null || true; }
have=$(installed)
missing=()
for p in "${packages[@]}"; do [[ $'\n'$have$'\n' == *$'\n'ii?' '$p$'\n'* ]] || missing+=("$p"); done
if ((${#missing[@]})); then
  install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}")
  root=()
  if ((EUID)); then
    if ! sudo -n true 2>/dev/null; then
      say "these packages are missing and this user may not install them. Run, then try again:"
      echo "  sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
      exit 1
    fi
    root=(sudo -n)
  fi
  say "installing ${missing[*]}"
  log=$(mktemp)
  if ! { "${root[@]}" "${install[@]}" || { "${root[@]}" apt-get update -q && "${root[@]}" "${install[@]}"; }; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    say "could not install. The command was: ${root[*]} ${install[*]}"
    exit 1
  fi
  rm -f "$log"
  have=$(installed)
fi

if [[ ! -f .venv/.stamp || $(<.venv/.stamp) != "$want" ]]; then
  say "LibTorch -> .venv"
  rm -f .venv/.stamp
  [[ -x .venv/bin/python ]] || "${PYTHON:-/usr/bin/python3}" -m venv .venv
  pip=(.venv/bin/python -m pip install -q --disable-pip-version-check --no-compile)
  if [[ $want == full* ]]; then "${pip[@]}" "${wheels[0]}" numpy; fi
  if ! "${pip[@]}" --no-deps "${wheels[@]}"; then
    say "pip failed; try: ${pip[*]} --no-deps ${wheels[*]}"
    exit 1
  fi
  echo "$want" >.venv/.stamp
fi

# A changed value makes Bazel look at the machine again (bazel/system_deps.bzl).
line="build --repo_env=ANNULUS_DEPS=$(cksum <<<"$want $have" | tr -d ' ')"
[[ -f .bazelrc.deps && $(<.bazelrc.deps) == "$line" ]] || echo "$line" >.bazelrc.deps
