// The check that lengths_test.cc (CPUs) and gpu_kernel_test.cc (GPUs) share: one attention call with awkward lengths,
// head sizes and windows, on any device with any kernel, compared with the definitions in fp64.
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
  std::string pattern;  // in the syntax of configurations
  int64_t query_offset = 0;
  int64_t batch = 1;
  double shift = 0;  // added to all scores

  std::string text() const;
};

// Returns cases with these heads and head size: lengths 1, 63 to 65, 127 to 129, 704 and `longest`, equal and unequal
// for queries and keys; causal, full and windowed; queries before all keys, which see none; and scores so low that
// exp(-lse) is no fp32 number.
std::vector<LengthCase> length_cases(int64_t heads, int64_t kv_heads, int64_t dim, int64_t longest);

// Returns an empty text if out, lse and all gradients are correct, else what is wrong. Correct results are at most
// three times as far from the definitions as a plain chain of operators of this dtype. The definitions are the oracle's
// predicate over pairs and dense fp64 products on the device, one kv head at a time.
std::string check_length(const LengthCase& c, KernelKind kernel, at::Device device, at::ScalarType type);

}  // namespace annulus::testing
