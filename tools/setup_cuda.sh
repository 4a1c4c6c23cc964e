# shellcheck shell=bash disable=SC2154,SC2034
# Sourced by tools/setup.sh: looks for the CUDA toolkit, and refuses a LibTorch for another version of CUDA.

look_for_cuda() {
  local home nvcc
  cuda=0
  for home in ${CUDA_HOME:-${CUDA_PATH:-/usr/local/cuda}}; do nvcc=$home/bin/nvcc; done
  case ${ANNULUS_CUDA-} in
    0) row CUDA "not used" "ANNULUS_CUDA=0" && return ;;
    1)
      [[ -x $nvcc ]] || fail "ANNULUS_CUDA=1, but there is no $nvcc. Install the CUDA toolkit 13, or set CUDA_HOME."
      ;;
    '')
      ((gpu)) || { row CUDA "not used" "no GPU with a driver here" && return; }
      if [[ ! -x $nvcc ]]; then
        row CUDA "not used" "a GPU, but no $nvcc"
        notes+=("This machine has a GPU; to use it, install the CUDA toolkit 13 or set CUDA_HOME, then ./annulus setup.")
        return
      fi
      ;;
    *) fail "ANNULUS_CUDA=$ANNULUS_CUDA: 0 or 1 is expected." ;;
  esac
  if [[ ${LIBTORCH-} && ! -e $LIBTORCH/lib/libtorch_cuda.so ]]; then
    [[ ${ANNULUS_CUDA-} == 1 ]] && fail "ANNULUS_CUDA=1, but LIBTORCH=$LIBTORCH is a LibTorch without CUDA (no lib/libtorch_cuda.so)."
    row CUDA "not used" "the LibTorch in LIBTORCH has no CUDA" && return
  fi
  cuda=1
  cuda_home=$home
  cuda_version=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
  have CUDA "$cuda_version" "$home" "$nvcc"
}

# Programs would load the CUDA runtimes of both versions, or find one of them missing, and neither error says why.
require_one_cuda() {
  local of_torch
  ((cuda)) && [[ $torch_root ]] || return 0
  of_torch=$(grep -ao 'libcudart\.so\.[0-9]*' "$torch_root/lib/libc10_cuda.so" 2>/dev/null | head -n 1) || true
  of_torch=${of_torch##*.}
  [[ ! $of_torch || $of_torch == "${cuda_version%%.*}" ]] ||
    fail "The LibTorch in $torch_root is for CUDA $of_torch, but the toolkit in $cuda_home is CUDA $cuda_version: the two must" \
      "have the same major version. Name a LibTorch for CUDA ${cuda_version%%.*} in LIBTORCH, or a toolkit of CUDA $of_torch in" \
      "CUDA_HOME; or build for CPUs with ANNULUS_CUDA=0."
}
