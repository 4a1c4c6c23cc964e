// See token_scores.h.
#include "runtime/model/token_scores.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "attention/execution/gather_positions.h"
#include "runtime/model/fused_ops.h"

namespace annulus {

TokenScores score_tokens(const Model& model, const at::Tensor& hidden, const at::Tensor& targets, const Layout& layout,
                         Communicator& host, const std::string& label) {
  const at::Tensor positions = at::tensor(layout.positions(host.rank()), at::kLong);
  const at::Tensor own = targets.index_select(1, positions).view({-1}).to(hidden.device());
  // Of this rank's targets: the losses, and 1 for first choices.
  const at::Tensor scores = at::zeros({2, own.numel()}, hidden.options().dtype(at::kDouble));
  const at::Tensor counted = at::nonzero(own.ge(0)).view({-1});
  const at::Tensor counted_targets = own.index_select(0, counted);
  at::Tensor nats = scores[0], first = scores[1];
  const int64_t rows = loss_chunk_rows(model.shape().vocab, hidden.scalar_type());
  model.visit_wide_logits(hidden.index_select(0, counted), rows, [&](int64_t begin, const at::Tensor& logits) {
    const at::Tensor of = counted_targets.narrow(0, begin, logits.size(0)).unsqueeze(1);
    const at::Tensor target = logits.gather(1, of);
    const at::Tensor at = counted.narrow(0, begin, logits.size(0));
    nats.index_copy_(0, at, (logits.logsumexp(1) - target.squeeze(1)).to(at::kDouble));
    first.index_copy_(0, at, logits.le(target).all(1).to(at::kDouble));
  });
  const at::Tensor all = gather_positions(host, scores.view({2, targets.size(0), positions.numel()}), layout, 2,
                                          {label + ", gathering the losses"});
  return all.defined() ? TokenScores{all[0], all[1].ne(0)} : TokenScores{};
}

}  // namespace annulus
