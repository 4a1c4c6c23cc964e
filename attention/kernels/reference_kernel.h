// The kernel `reference`, which choose_kernel.cc makes.
#pragma once

#include <memory>

#include "attention/tiles/kernel.h"

namespace annulus {

std::unique_ptr<Kernel> make_reference_kernel();

}  // namespace annulus
