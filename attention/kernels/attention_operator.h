// A uniform interface of libraries' attention operators on dense tensors that return the logsumexp.
// library_operators.cc implements it and hides the differences; operator_list.cc dispatches calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "attention/pattern/span.h"

namespace annulus {

// The sizes of a call, for planning memory.
struct OperatorSize {
  int64_t batch = 0, queries = 0, keys = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t element = 0;  // bytes per element
  bool deterministic = false;
  int64_t multiprocessors = 0;  // of the GPU; 0: unknown
};

// Returns whether LibTorch raises an error, and not just a warning, for nondeterministic operators.
bool deterministic_only();

// Shapes: q, dout, out [b, n, h, D]; k, v [b, m, hk, D], where h is a multiple of hk; lse [b, h, n]. n, m, D >= 1, D is
// a multiple of 8, and b < 65536. The tensors may be views with a contiguous last dimension, strides that are multiples
// of 8 elements and addresses that are multiples of 16 bytes; dout and out have q's strides, and lse is contiguous.
//
// The pairs of row i and key j with j - i in `band` are counted. The band is unbounded on both sides; or {unbounded, 0}
// with n = m (causal); or, if any_band(), any other band with n <= m in which each row and each key has a counted pair
// and sides that cut nothing are unbounded.
//
// Implementations have no state and are thread safe.
class AttentionOperator {
 public:
  virtual ~AttentionOperator() = default;

  // Returns a unique name, such as "cudnn" or "flash2", the key of OperatorHistory (operator_list.h).
  virtual std::string_view name() const = 0;
  virtual bool any_band() const { return false; }
  struct Question {
    int64_t queries = 0, keys = 0;
    bool causal = false, backward = false;
  };
  virtual bool takes(const Question&) const { return true; }
  // Returns whether the operator searches for an execution plan for each new shape, which is expensive. If there is no
  // plan, the call raises c10::Error, and no call of that shape and direction may follow; operator_list.cc ensures
  // that.
  virtual bool prepares_shapes() const { return false; }

  struct Forward {
    at::Tensor out;  // like q, in its dtype
    at::Tensor lse;  // [b, h, n] accumulator's dtype; natural logarithm, of scaled scores; -inf without keys
  };
  virtual Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                          double scale) const = 0;

  struct Backward {
    at::Tensor dq, dk, dv;  // like q, k, v, in q's dtype or in fp32
  };
  // Returns the peak bytes of backward() besides its results.
  virtual int64_t backward_bytes(const OperatorSize& size) const = 0;
  // Takes out and lse of the rows over all their keys, not only those of this call, with lse = +inf for rows without
  // any key.
  virtual Backward backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& out, const at::Tensor& lse, const Band& band, double scale) const = 0;
};

}  // namespace annulus
