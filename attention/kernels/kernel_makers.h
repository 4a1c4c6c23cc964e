// The functions with which choose_kernel.cc makes kernels (make_composed_kernel is in composed_kernel.h), and charges
// that several kernels declare. Internal to attention/kernels.
#pragma once

#include <limits>
#include <memory>
#include <vector>

#include "attention/kernels/kernel.h"
#include "attention/tiles/dense_tiles.h"

namespace annulus {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::unique_ptr<Kernel> make_reference_kernel();
std::unique_ptr<Kernel> make_cpu_kernel(at::ScalarType type);  // the dtype of q

// Adds the charges of a kernel that computes tiles densely if pairs are dropped, in elements of `wide` bytes.
inline void add_dense_charges(const CallSize& size, int64_t wide, std::vector<Charge>& charges) {
  if (!size.dropout) return;
  const DenseBytes bytes = dense_bytes(size.queries, size.keys, size.heads, wide);
  charges.push_back({"a dense block", bytes.forward, When::kForward});
  charges.push_back({"a dense block", bytes.backward, When::kBackward});
}

}  // namespace annulus
