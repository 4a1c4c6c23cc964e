// Projections and attention that save only the inputs, out and lse: the backward recomputes the projections, but not
// attention. Used by MultiheadAttention if recompute is set.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/execution/attention.h"
#include "attention/modules/rotary.h"

namespace annulus {

// Weights [out, in] and biases [out] (or undefined) of the projections to queries, keys and values.
struct ProjectionWeights {
  at::Tensor q, q_bias, k, k_bias, v, v_bias;
};

struct ProjectionPlan {
  int64_t heads = 1, kv_heads = 1, head_dim = 1;
  RotaryTable query_rotary, key_rotary;  // undefined tensors: no rotary embedding
};

struct Projected {
  at::Tensor q;     // [B, n, heads, head_dim]
  at::Tensor k, v;  // [B, m, kv_heads, head_dim]
};

// Projects x [B, n, .] to q, and memory [B, m, .] to k and v. Differentiable.
Projected project(const at::Tensor& x, const at::Tensor& memory, const ProjectionWeights& weights,
                  const ProjectionPlan& plan);

// Returns attention(project(...)), [B, n, heads, head_dim], with the same values and gradients. Sinks are given if
// call.sinks.
at::Tensor projected_attention(const at::Tensor& x, const at::Tensor& memory, const ProjectionWeights& weights,
                               const ProjectionPlan& plan, const AttentionCall& call, const at::Tensor& sinks = {});

}  // namespace annulus
