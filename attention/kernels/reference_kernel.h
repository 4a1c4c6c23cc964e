// The kernel `reference`: dense fp64 over each tile. Used by choose_kernel.cc.
#pragma once

#include <memory>

#include "attention/tiles/kernel.h"

namespace annulus {

std::unique_ptr<Kernel> make_reference_kernel();

}  // namespace annulus
