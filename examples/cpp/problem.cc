// Implements problem.h.
#include "problem.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/execution/attention.h"

namespace {

constexpr int64_t kBatch = 2, kHeads = 4, kHeadDim = 16;

// Dense causal attention of q, k and v [B, S, H, D]: score = q.k / sqrt(D), hidden if the key is later than the query.
at::Tensor dense_causal(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const at::Tensor score = at::matmul(q.transpose(1, 2), k.permute({0, 2, 3, 1})) / std::sqrt(double{kHeadDim});
  const at::Tensor position = at::arange(q.size(1));
  const at::Tensor hidden = position.unsqueeze(0) > position.unsqueeze(1);
  const at::Tensor p = at::softmax(score.masked_fill(hidden, -std::numeric_limits<double>::infinity()), -1);
  return at::matmul(p, v.transpose(1, 2)).transpose(1, 2);
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == 0 ? 0 : (a - b).abs().max().item<double>();
}

}  // namespace

double largest_error(annulus::Communicator& comm, int64_t length) {
  // The request, which must be the same on all ranks.
  annulus::AttentionCall call;
  call.comm = &comm;
  call.request.shape = {.batch = kBatch, .heads = kHeads, .kv_heads = kHeads, .q_len = length, .k_len = length};
  call.request.pattern = annulus::parse_pattern("{ kind = 'causal' }", "pattern");
  call.request.layout = annulus::LayoutKind::kZigzag;
  call.request.ranks = comm.size();

  // The generator gives the same numbers on all ranks. In a real program a rank would have only its own rows; here each
  // rank also needs the whole tensors for the comparison.
  at::Generator generator = at::detail::createCPUGenerator(1);
  const auto random = [&] { return at::randn({kBatch, length, kHeads, kHeadDim}, generator, at::kDouble); };
  const at::Tensor q = random(), k = random(), v = random(), dout = random();

  // The rows of this rank, in the order in which it stores them.
  const std::vector<int64_t> positions = query_layout(call.request).positions(comm.rank());
  const at::Tensor rows = at::tensor(positions, at::kLong);
  const auto mine = [&](const at::Tensor& whole) { return whole.index_select(1, rows); };
  const at::Tensor my_q = mine(q).requires_grad_(), my_k = mine(k).requires_grad_(), my_v = mine(v).requires_grad_();

  const at::Tensor out = annulus::attention(my_q, my_k, my_v, call);
  const auto grads = torch::autograd::grad({out}, {my_q, my_k, my_v}, {mine(dout)});

  for (const at::Tensor& whole : {q, k, v}) whole.requires_grad_();
  const at::Tensor dense_out = dense_causal(q, k, v);
  const auto dense_grads = torch::autograd::grad({dense_out}, {q, k, v}, {dout});

  double error = difference(out.detach(), mine(dense_out.detach()));
  for (size_t i = 0; i < grads.size(); ++i) error = std::max(error, difference(grads[i], mine(dense_grads[i])));
  at::Tensor largest = at::tensor({error}, at::kDouble);
  comm.all_reduce(largest, annulus::ReduceOp::kMax, {"largest error", 0});
  return largest.item<double>();
}
