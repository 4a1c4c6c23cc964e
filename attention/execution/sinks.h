// Attention sinks: a learned logit s_h for each query head in the denominator of the softmax, as in gpt-oss
// (transformers, modeling_gpt_oss.py). A sink is a key that every query sees, with the score s_h and the value 0. Used
// by the executor, by generated text (runtime/inference/kv_cache.cc) and by python/ops.
//
// With out and lse over all keys, lse' = log(exp(lse) + exp(s_h)) and out' = out exp(lse - lse'). So a sink is added
// once, to what has been merged over all keys, and the backward that is given out' and lse' computes the gradients of
// q, k and v as it is. That of s_h is the sum over all queries of -exp(s_h - lse') <dout, out'>.
//
// sinks: [H] of a floating dtype; -inf means no sink. Thread safety: functions without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace annulus {

// Adds the sinks to out [B, n, H, D] and lse [B, H, n], in place. A query that sees no key keeps out 0, and its lse
// becomes s_h.
void add_sinks(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& sinks);

// Returns the sum over batch rows and queries of exp(s_h - lse) <dout, -out>, [H], in the dtype of lse: this rank's
// part of the gradient of the sinks. `out` and `lse` are those with the sinks; dout is like out. On a CPU each head is
// added up in fp64 in the order of rows, on a GPU in the dtype of lse.
at::Tensor sink_gradients(const at::Tensor& dout, const at::Tensor& out, const at::Tensor& lse,
                          const at::Tensor& sinks);

// Returns the sum of exp(s_h - lse) dlse likewise, [H]: what the gradient of lse [B, H, n] adds to it.
at::Tensor sink_gradients_of_lse(const at::Tensor& dlse, const at::Tensor& lse, const at::Tensor& sinks);

// Returns the peak bytes of add_sinks, or of sink_gradients, for so many rows, batch * n, whose elements take `element`
// bytes, and those of lse `wide`.
int64_t sink_bytes(int64_t rows, int64_t heads, int64_t head_dim, int64_t element, int64_t wide, bool backward);

}  // namespace annulus
