// A library's attention on dense tensors, with its logsumexp: what LibTorch's operators differ in is brought to one
// form here. kernels/composed_kernel.cc composes tiles of their calls; library_operators.cc has them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "attention/pattern/span.h"

namespace annulus {

// Of a call, before there are tensors.
struct OperatorSize {
  int64_t batch = 0, queries = 0, keys = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t element = 0;  // bytes
  bool deterministic = false;
  int64_t multiprocessors = 0;  // of the GPU; 0: not known
};

// Shapes: q, dout, out [b, n, h, D]; k, v [b, m, hk, D], h a multiple of hk; lse [b, h, n]. Views with a contiguous
// last dimension, strides that are multiples of 8 elements and addresses that are multiples of 16 bytes; dout and out
// with q's strides, lse contiguous. n, m, D >= 1, D a multiple of 8; b below 65536. Counted are the pairs whose index
// difference j - i lies in `band`: unbounded on both sides; {unbounded, 0}, where n = m (causal); or, where any_band(),
// any other with n <= m, each row and each key in some counted pair, and sides that cut nothing unbounded.
class AttentionOperator {
 public:
  virtual ~AttentionOperator() = default;

  virtual bool any_band() const { return false; }
  virtual bool takes(int64_t /*queries*/, int64_t /*keys*/) const { return true; }
  // A new shape costs it much (it searches for a plan): not for problems of many shapes.
  virtual bool prepares_shapes() const { return false; }

  struct Forward {
    at::Tensor out;  // like q, of its dtype
    at::Tensor lse;  // [b, h, n] in the accumulator's dtype, natural log, scale included; -inf for a row without keys
  };
  virtual Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                          double scale) const = 0;

  struct Backward {
    at::Tensor dq, dk, dv;  // like q, k, v, of their dtype
  };
  // Bytes that backward() takes at most besides its results.
  virtual int64_t backward_bytes(const OperatorSize& size) const = 0;
  // out, lse: of all keys of these rows, not of these alone. A row that has none anywhere has lse = +inf.
  virtual Backward backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& out, const at::Tensor& lse, const Band& band, double scale) const = 0;
};

}  // namespace annulus
