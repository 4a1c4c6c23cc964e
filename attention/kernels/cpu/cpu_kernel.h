// The kernel `cpu`: flash attention on CPUs. Used by attention/kernels/choose_kernel.cc.
#pragma once

#include <memory>

#include "attention/tiles/kernel.h"

namespace annulus {

std::unique_ptr<Kernel> make_cpu_kernel(at::ScalarType type);  // the dtype of q

}  // namespace annulus
