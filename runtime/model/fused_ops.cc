// See fused_ops.h.
#include "runtime/model/fused_ops.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "common/error.h"
#include "runtime/model/choose_ops.h"
#include "runtime/model/products.h"

namespace annulus {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr std::string_view kSumsOfWeight = "sums of the weight's gradient";

// Makes a tensor contiguous; an undefined one stays undefined.
at::Tensor dense(const at::Tensor& t) { return t.defined() ? t.contiguous() : t; }

class AddRmsNorm : public Function<AddRmsNorm> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const std::optional<at::Tensor>& delta,
                               const at::Tensor& weight, double offset, double eps) {
    const at::Tensor added = delta.value_or(at::Tensor());
    const RmsNorm r = ops_for({x, weight, added}).add_rms_norm(x, added, {weight, offset}, eps);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({r.sum, weight, r.inv_rms});
    ctx->saved_data["has_delta"] = delta.has_value();
    ctx->saved_data["offset"] = offset;
    return {r.sum, r.y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const bool has_delta = ctx->saved_data["has_delta"].toBool();
    const at::Tensor &sum = saved[0], &weight = saved[1], &inv_rms = saved[2];
    const at::Tensor dsum = dense(grads[0]), dy = dense(grads[1]);
    variable_list gradients(5);  // undefined ones of offset and eps
    if (!dy.defined()) {
      gradients[0] = dsum;
    } else {
      const NormWeight of{weight, ctx->saved_data["offset"].toDouble()};
      RmsNormGradient g = ops_for({sum, weight, dy, dsum}).add_rms_norm_backward(dy, dsum, sum, of, inv_rms);
      gradients[0] = std::move(g.dx), gradients[2] = g.dweight.to(weight.scalar_type());
    }
    if (has_delta) gradients[1] = gradients[0];
    return gradients;
  }
};

class LinearCrossEntropySum : public Function<LinearCrossEntropySum> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& head,
                            const at::Tensor& targets, const std::optional<at::Tensor>& weights, double scale,
                            int64_t chunk_rows, bool with_gradient) {
    const int64_t rows = hidden.size(0);
    const auto gradient = with_gradient ? std::optional(hidden.scalar_type()) : std::nullopt;
    at::Tensor loss;
    at::Tensor dhidden = with_gradient ? at::empty_like(hidden) : at::Tensor();
    at::Tensor dhead;
    for (int64_t first = 0; first < rows; first += chunk_rows) {
      const int64_t n = std::min(chunk_rows, rows - first);
      const at::Tensor part = hidden.narrow(0, first, n);
      at::Tensor logits = wide_product(part, head.t());
      const DecoderOps& ops = ops_for({logits});
      const at::Tensor its_weights = weights ? weights->narrow(0, first, n) : at::Tensor();
      const CrossEntropy c =
          ops.cross_entropy(std::move(logits), targets.narrow(0, first, n), its_weights, scale, gradient);
      loss = loss.defined() ? loss.add_(c.loss) : c.loss;
      if (!with_gradient) continue;
      product_into(dhidden.narrow(0, first, n), c.dlogits, head);
      if (dhead.defined()) {
        add_wide_product(dhead, c.dlogits.t(), part);
      } else {
        dhead = wide_product(c.dlogits.t(), part);
      }
    }
    if (with_gradient) ctx->save_for_backward({dhidden, dhead.to(head.scalar_type())});
    return loss.mul_(scale).to(at::toOpMathType(hidden.scalar_type()));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result = ctx->get_saved_variables();
    // A training step begins its backward with 1. On a GPU, to read the number would be to wait for the device.
    if (!grads[0].is_cpu() || grads[0].item<double>() != 1) {
      for (at::Tensor& t : result) t = t * grads[0];
    }
    result.resize(7);  // undefined gradients of targets, weights, scale, chunk_rows and with_gradient
    return result;
  }
};

}  // namespace

Normed add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const NormWeight& weight, double eps) {
  const variable_list out = AddRmsNorm::apply(x, delta.defined() ? std::optional<at::Tensor>(delta) : std::nullopt,
                                              weight.weight, weight.offset, eps);
  return {out[0], out[1]};
}

int64_t loss_chunk_rows(int64_t vocab, at::ScalarType dtype) {
  const auto element = static_cast<int64_t>(c10::elementSize(at::toOpMathType(dtype)));
  return std::max<int64_t>(1, kLossChunkBytes / (vocab * element));
}

int64_t Computes::wide() const { return static_cast<int64_t>(c10::elementSize(at::toOpMathType(dtype))); }

Part norm_charges(int64_t rows, int64_t dim, bool with_sum, const Computes& on) {
  const int64_t all = rows * dim * on.element();
  Part part{kNormPart,
            {{"sum", all, When::kKept},
             {"statistics", rows * on.wide(), When::kKept},
             {kNormOperands, 2 * all, When::kForward},
             {kGivenGradient, with_sum ? all : 0, When::kBackward},
             {kNormGradients, 2 * all, When::kBackward},
             {kSumsOfWeight, on.gpu ? kernel_norm_sums(rows, dim, on.dtype) : 0, When::kBackward}}};
  if (on.single_passes()) return part;
  for (const Charge& charge : composed_norm_charges(rows, dim, on.element(), on.wide())) part.charges.push_back(charge);
  return part;
}

Part head_norm_charges(int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, const Computes& on) {
  const int64_t all = rows * (heads + 2 * kv_heads) * head_dim * on.element();
  Part part{"norm of heads",
            {{"projection", all, When::kKept},
             {"statistics", rows * (heads + kv_heads) * on.wide(), When::kKept},
             {"result", all, When::kForward},
             {kGivenGradient, all, When::kBackward},
             {kProjectionGradient, all, When::kBackward},
             {kSumsOfWeight, on.gpu ? kernel_norm_sums(rows * heads, head_dim, on.dtype) : 0, When::kBackward}}};
  if (on.single_passes()) return part;
  // The queries alone, as rows of heads, and what their norm takes.
  const int64_t queries = rows * heads * head_dim * on.element();
  part.charges.push_back({"queries and their norm", 2 * queries, When::kForward});
  part.charges.push_back({"queries and their gradients", 3 * queries, When::kBackward});
  for (const Charge& charge : composed_norm_charges(rows * heads, head_dim, on.element(), on.wide()))
    part.charges.push_back(charge);
  return part;
}

Part rotary_charges(int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, const Computes& on) {
  const int64_t all = rows * (heads + 2 * kv_heads) * head_dim * on.element();
  // Half of the queries at a time, in the table's dtype.
  const int64_t working = on.single_passes() ? 0 : rows * heads * head_dim / 2 * on.wide();
  return {"rotary",
          {{kRotaryOperands, 2 * all, When::kForward},
           {"half of the queries", working, When::kForward},
           {kGivenGradient, all, When::kBackward},
           {kProjectionGradient, all, When::kBackward},
           {"half of the queries", working, When::kBackward}}};
}

Part glu_charges(int64_t rows, int64_t ffn, const Computes& on) {
  const int64_t one = rows * ffn * on.element();
  return {"glu",
          {{"gate and up", 2 * one, When::kKept},
           {"product", one, When::kForward},
           {kGivenGradient, one, When::kBackward},
           {"gradients of gate and up", 2 * one, When::kBackward},
           {"a temporary of composed operators", on.single_passes() ? 0 : one, When::kBackward}}};
}

Part loss_charges(int64_t rows, int64_t dim, int64_t vocab, const Computes& on) {
  const int64_t e = on.element(), wide = on.wide();
  const int64_t chunk = std::min(rows, loss_chunk_rows(vocab, on.dtype)), logits = chunk * vocab, head = vocab * dim;
  const bool several = chunk < rows, copies = e != wide;
  // What a chunk holds, one after the other: its logits; on a CPU their gradient in another dtype; and the head's
  // gradient from it, which is added to that of the chunks before; on a CPU also the factors of the products in the
  // wider dtype. On a GPU the gradient lies in the memory of the logits, and that of the head in that of the chunks
  // before.
  const int64_t before = several ? head * wide : 0;
  const int64_t widened = copies && !on.gpu ? wide * (chunk * dim + std::max(head, logits)) : 0;
  const int64_t of_product = logits * wide + before + (copies && !on.gpu ? wide * (chunk * dim + head) : 0) +
                             (on.loops() ? chunk * dim * e : 0);  // product_into
  const int64_t of_gradient = logits * (on.gpu ? wide : e) + head * wide + (on.gpu ? 0 : before) + widened;
  const int64_t of_cast = copies && !on.gpu ? logits * (wide + e) + before : 0;
  const int64_t of_entropy = on.composes_loss() ? composed_cross_entropy_bytes(logits, wide) + before : 0;
  const int64_t most = std::max({of_product, of_gradient, of_cast, of_entropy, head * (copies ? wide + e : wide)});
  return {"loss",
          {{"gradient of the hidden states", rows * dim * e, When::kKept},
           {"gradient of the head", head * e, When::kKept},
           {"hidden states", rows * dim * e, When::kForward},
           {"a chunk of logits, and gradients", most - head * e, When::kForward},
           {"products of both with the gradient of the loss", on.gpu ? (rows * dim + head) * e : 0, When::kBackward}}};
}

at::Tensor linear_cross_entropy_sum(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                                    double scale, int64_t chunk_rows, const at::Tensor& weights) {
  const int64_t vocab = head.size(0);
  if (targets.is_cpu() && targets.numel() > 0) {
    const auto [low, high] = at::aminmax(targets);
    const int64_t lowest = low.item<int64_t>(), highest = high.item<int64_t>();
    if (lowest < -1 || highest >= vocab) {
      throw Error(ErrorKind::kInput, "model",
                  "the target " + std::to_string(lowest < -1 ? lowest : highest) + " is outside the vocabulary [0, " +
                      std::to_string(vocab) + "): set model.vocab to hold every token of the data");
    }
  }
  if (chunk_rows <= 0) chunk_rows = loss_chunk_rows(vocab, hidden.scalar_type());
  return LinearCrossEntropySum::apply(
      hidden, head, targets, weights.defined() ? std::optional<at::Tensor>(weights) : std::nullopt, scale, chunk_rows,
      at::GradMode::is_enabled() && (hidden.requires_grad() || head.requires_grad()));
}

}  // namespace annulus
