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

// Returns the unit roundoff of a kernel's products, which are fp32 for narrower inputs. On a GPU the operator
// `efficient` cuts fp32 factors into two numbers of 11 bits and leaves out the product of the second ones
// (OpMultiplyAddFastF32 of CUTLASS). What is left out is up to 2^-20 of a product, and 2^-23 in the mean; the cut
// second numbers add as much.
double unit_of(KernelKind kernel, at::Device device, at::ScalarType type);

// Returns an empty text if out, lse and all gradients are as exact as their dtype allows (plain_attention.h), else what
// is wrong. The definitions are the oracle's predicate over pairs and dense fp64 products on the device, one kv head at
// a time.
std::string check_length(const LengthCase& c, KernelKind kernel, at::Device device, at::ScalarType type);

}  // namespace annulus::testing
