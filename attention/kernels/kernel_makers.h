// The kernels there are, for choose_kernel.cc, which takes one. Internal to attention/kernels.
#pragma once

#include <memory>

#include "attention/kernels/kernel.h"

namespace annulus {

std::unique_ptr<Kernel> make_reference_kernel();
std::unique_ptr<Kernel> make_aten_kernel(at::ScalarType type);  // of q

}  // namespace annulus
