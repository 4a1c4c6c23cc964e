// Dense attention over one masked rectangle. Masked keys and values never affect a result, not even by an infinity or a
// NaN. Used by dense_tiles.cc. The functions are thread safe.
#pragma once

#include <ATen/core/Tensor.h>

namespace annulus {

struct DenseForward {
  at::Tensor out, lse;  // [b, h, n, D] and [b, h, n]; lse is -inf for rows without a key
};
struct DenseBackward {
  at::Tensor dq, dk, dv;  // like q, k, v
};

// q is [b, h, n, D]; k and v are [b, hk, m, D], where h is a multiple of hk. `mask` is bool [n, m], true for counted
// pairs, or undefined if all are. `factors` is [b, h, n, m] or undefined: dropout's factors of the probabilities
// (dropout.h), 0 for dropped pairs. Scores are scale * q.k, or with softcap > 0 softcap * tanh(scale / softcap * q.k).
// Computes in the tensors' dtype and takes memory proportional to n x m.
DenseForward dense_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask,
                           const at::Tensor& factors, double scale, double softcap = 0);

// Computes the gradients from the merged out [b, h, n, D] (with dropout applied) and the merged lse [b, h, n], which is
// -inf for rows without any key and may have a narrower dtype.
DenseBackward dense_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& out, const at::Tensor& lse, const at::Tensor& mask,
                             const at::Tensor& factors, double scale, double softcap = 0);

}  // namespace annulus
