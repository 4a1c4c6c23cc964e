// One call of a kernel on hand-made tiles, and what the definitions make of it: for the tests of kernels, on any
// device.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "attention/kernels/choose_kernel.h"

namespace annulus::testing {

// One call of a kernel: q of all batch rows and heads, one block of keys, one of gradients.
struct Case {
  at::Tensor q, dout;
  KeyBlock keys;
  Span grad_batch, grad_heads;
  int64_t grad_rows = 0;
  std::vector<Tile> tiles;
  KernelCall call;
};

struct Result {
  at::Tensor out, lse, dq, dk, dv;
  int64_t peak = 0;
};

// Forward and backward, by kernels made anew for each.
Result run(const Case& c, const std::function<std::unique_ptr<Kernel>()>& make);
Result run(const Case& c, KernelKind kind);

// By the definitions, pair by pair in fp64: scores as often as tiles count the pair, dropout's factors as they are. Of
// tensors on the CPU.
Result by_definition(const Case& c);

// The largest difference of any result; infinite where infinities and NaN stand in different places.
double worst(const Result& got, const Result& want);

// 4 query heads, 2 kv heads, 3 batch rows. The keys hold batch rows 0 and 2 (as a strided view) and kv head 1 or both;
// the gradients hold all batch rows and heads, and their rows lie elsewhere.
Case scattered(at::ScalarType type, bool one_head, int64_t head_dim = 8);

// The same with its tensors elsewhere, or of another dtype.
Case moved(Case c, at::Device device, at::ScalarType type);

}  // namespace annulus::testing
