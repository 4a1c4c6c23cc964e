// One attention call at awkward lengths, head sizes and windows, on any device with any kernel, against the definitions
// in fp64: the same check for the kernels of CPUs and of GPUs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "attention/kernels/choose_kernel.h"

namespace annulus::testing {

struct LengthCase {
  int64_t queries = 0, keys = 0;
  int64_t heads = 1, kv_heads = 1, dim = 8;
  std::string pattern;  // as configurations write it
  int64_t query_offset = 0;
  int64_t batch = 1;

  std::string text() const;
};

// Lengths 1, 63 to 65, 127 to 129, 704 (and `longest`), alike and not, causal, full, windows, and queries that stand
// before all keys and so see none; with these heads and head size.
std::vector<LengthCase> length_cases(int64_t heads, int64_t kv_heads, int64_t dim, int64_t longest);

// Empty when out, lse and all gradients are right: at most three times as far from the definitions as a plain chain of
// operators of this dtype is. The definitions are the oracle's predicate over pairs and dense fp64 products on the
// device, one kv head at a time.
std::string check_length(const LengthCase& c, KernelKind kernel, at::Device device, at::ScalarType type);

}  // namespace annulus::testing
