// For the tests of kernels on any device: one call of a kernel on hand-made tiles, and its result by the definitions.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "attention/oracle/oracle.h"
#include "tests/attention/kernels/plain_attention.h"

namespace annulus::testing {

// One call of a kernel: q of all batch rows and heads, one block of keys, and one block of gradients.
struct Case {
  at::Tensor q, dout;
  KeyBlock keys;
  Span grad_batch, grad_heads;
  int64_t grad_rows = 0;
  std::vector<Tile> tiles;
  KernelCall call;
};

struct Result : OracleResult {
  int64_t peak = 0;
};

// Runs forward and backward, each with a new kernel from `make`.
Result run(const Case& c, const std::function<std::unique_ptr<Kernel>()>& make);
Result run(const Case& c, KernelKind kind);

// Computes the result by the definitions, pair by pair in fp64: a pair's score counts as often as the tiles contain it,
// with the oracle's dropout factors. The tensors must be on the CPU.
Expected by_definition(const Case& c);

// Whether a result is as exact as the dtype of the case allows (plain_attention.h).
::testing::AssertionResult right(const Result& got, const Case& c, const Expected& want,
                                 std::optional<double> unit = {});
::testing::AssertionResult right(const Result& got, const Case& c);

// Makes a case of 4 query heads, 2 kv heads and 3 batch rows. The keys hold batch rows 0 and 2 (as a strided view) and
// kv head 1 or both. The gradients hold all batch rows and heads, with other row numbers than the keys.
Case scattered(at::ScalarType type, bool one_head, int64_t head_dim = 8);

// Returns the case with its tensors on another device or in another dtype.
Case moved(Case c, at::Device device, at::ScalarType type);

}  // namespace annulus::testing
