// The kernel `cpu`, which attention/kernels/choose_kernel.cc makes.
#pragma once

#include <memory>

#include "attention/tiles/kernel.h"

namespace annulus {

std::unique_ptr<Kernel> make_cpu_kernel(at::ScalarType type);  // the dtype of q

}  // namespace annulus
