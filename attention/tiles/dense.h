// Dense attention over one masked rectangle, exact about what the mask hides: nothing of a hidden key or value, not
// even an infinity or a NaN, reaches a result. Used by dense_tiles.cc and the
// cpu kernel.
#pragma once

#include <ATen/core/Tensor.h>

namespace annulus {

struct DenseForward {
  at::Tensor out, lse;  // [b, h, n, D], [b, h, n]; -inf for rows without a key
};
struct DenseBackward {
  at::Tensor dq, dk, dv;  // like q, k, v
};

// q [b, h, n, D], k and v [b, hk, m, D], h a multiple of hk; mask bool [n, m] or undefined (nothing hidden); factors
// [b, h, n, m] or undefined: what dropout multiplies probabilities by (dropout.h), 0 where a pair is dropped. Computes
// in the tensors' dtype. Quadratic memory in n x m.
DenseForward dense_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask,
                           const at::Tensor& factors, double scale);

// From the merged out [b, h, n, D], dropped, and lse [b, h, n] of all keys of these rows (lse = -inf: none).
DenseBackward dense_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& out, const at::Tensor& lse, const at::Tensor& mask,
                             const at::Tensor& factors, double scale);

// No element is infinite or NaN.
bool all_finite(const at::Tensor& tensor);

}  // namespace annulus
