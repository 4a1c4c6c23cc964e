// Settings of LibTorch's environment with which its attention operators would compute wrongly. Used by attention.h's
// functions, and earlier by programs (launcher/program.cc) and the library for PyTorch (python/ops/), because LibTorch
// reads such a variable only once.
#pragma once

namespace annulus {

// Sets TORCH_CUDNN_SDPA_AVOID_RECOMPILE to "0" for the whole process if it is "1": with it, cuDNN's attention in
// LibTorch 2.11 gives wrong gradients for batches of more than one row. LibTorch reads it at its first call of that
// operator, so this comes too late if the process has called it before. Returns whether the variable was "1".
// Thread-safe with respect to LibTorch and to itself.
bool avoid_wrong_gradients();

}  // namespace annulus
