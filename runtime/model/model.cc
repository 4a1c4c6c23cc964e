// See model.h.
#include "runtime/model/model.h"

#include <ATen/OpMathType.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "memory/tiers/offload.h"
#include "runtime/model/products.h"

namespace annulus {
namespace {

std::string layer_name(int64_t layer, const char* rest) { return "model.layers." + std::to_string(layer) + "." + rest; }

}  // namespace

Model::Model(const ModelShape& shape, uint64_t seed, at::ScalarType dtype, at::Device device)
    : Model(shape, dtype, device, Unheld{}) {
  parameters_.hold_all(seed);
}

Model::Model(const ModelShape& shape, at::ScalarType dtype, at::Device device, Unheld unheld) : shape_(shape) {
  validate(shape);
  Parameters& p = parameters_ = Parameters(described_units(shape));
  p.lay_out(unheld.parts);
  p.make_leaves(dtype, device);
  embedding_ = p.leaf("model.embed_tokens.weight");
  for (int64_t i = 0; i < shape.layers; ++i) {
    const auto leaf = [&](bool there, const char* name, int parts = 1) {
      return there ? p.leaf(layer_name(i, name), parts) : at::Tensor();
    };
    const auto norm = [&](bool there, const std::string& name) {
      return NormWeight(leaf(there, name.c_str()), shape.norm_offset());
    };
    layers_.push_back({.attention_norm = norm(true, "input_layernorm.weight"),
                       .qkv = leaf(true, "self_attn.q_proj.weight", 3),
                       .qkv_bias = leaf(shape.qkv_bias, "self_attn.q_proj.bias", 3),
                       .q_norm = norm(shape.qk_norm, "self_attn.q_norm.weight"),
                       .k_norm = norm(shape.qk_norm, "self_attn.k_norm.weight"),
                       .sinks = leaf(shape.attention_sinks.of(i), "self_attn.sinks"),
                       .out = leaf(true, "self_attn.o_proj.weight"),
                       .out_bias = leaf(shape.out_bias, "self_attn.o_proj.bias"),
                       .attention_post_norm = norm(shape.post_norms, kAttentionPostNorm),
                       .mlp_norm = norm(true, mlp_norm_name(shape)),
                       .gate_up = leaf(true, "mlp.gate_proj.weight", 2),
                       .gate_up_bias = leaf(shape.mlp_bias, "mlp.gate_proj.bias", 2),
                       .down = leaf(true, "mlp.down_proj.weight"),
                       .down_bias = leaf(shape.mlp_bias, "mlp.down_proj.bias"),
                       .mlp_post_norm = norm(shape.post_norms, kMlpPostNorm)});
  }
  norm_ = {p.leaf("model.norm.weight"), shape.norm_offset()};
  head_ = shape.tie_embeddings ? embedding_ : p.leaf("lm_head.weight");
}

void add_model_charges(const ModelShape& s, const StepRows& of, const Computes& on,
                       const std::vector<AttentionCharges>& attention, const std::vector<PlaceCharges>& places,
                       StepCharges& step) {
  const int64_t rows = of.batch * of.length, e = on.element(), stream = rows * s.dim * e;
  const auto taken_at = [&](size_t place) { return place < places.size() ? places[place] : PlaceCharges{}; };
  const auto at_place = [&](size_t place, Part part) {
    part.charges.push_back({kWeightsOfPlaces, taken_at(place).forward, When::kForward});
    part.charges.push_back({kWeightsOfPlaces, taken_at(place).backward, When::kBackward});
    return part;
  };
  const auto end_of = [&](size_t place) {
    if (const int64_t bytes = taken_at(place).ends; bytes > 0)
      step.then({kSumsOfGradients, {{kWeightsOfPlaces, bytes, When::kBackward}}});
  };
  end_of(kEmbeddingPlace);
  step.then(at_place(kEmbeddingPlace, {"embedding",
                                       {{"result", stream, When::kForward},
                                        {kGivenGradient, stream, When::kBackward},
                                        {"scaled gradient", s.scale_embeddings ? stream : 0, When::kBackward},
                                        {"gradient of the weight", s.vocab * s.dim * e, When::kBackward}}}));
  const auto layers = static_cast<int64_t>(attention.size());
  for (int64_t i = 0; i < layers; ++i) {
    std::vector<Part> parts =
        decoder_layer_charges(s, of.batch, of.length, on, of.recompute, i > 0, attention[static_cast<size_t>(i)],
                              {taken_at(place_before_attention(i)), taken_at(place_after_attention(i))});
    i < of.offloaded ? step.then_offloaded(std::move(parts)) : step.then_all(std::move(parts));
  }
  Part norm = norm_charges(rows, s.dim, /*with_sum=*/false, on);
  norm.charges.push_back({"the residual stream", stream, When::kForward});
  const size_t output = output_place(layers);
  step.then(at_place(output - 1, std::move(norm)));
  end_of(output);
  step.then(at_place(output, loss_charges(rows, s.dim, s.vocab, on)));
}

RotaryTables Model::rotary(const at::Tensor& positions) const {
  ModelShape::Rotaries of = shape_.rotaries();
  RotaryTables tables{.distinct = {}, .of_layer = std::move(of.of_layer)};
  for (const RotarySpec& spec : of.distinct) {
    tables.distinct.push_back(
        make_rotary_table(positions, spec, at::toOpMathType(parameters_.dtype()), embedding_.device()));
  }
  return tables;
}

at::Tensor Model::embedded(const at::Tensor& tokens) const {
  at::Tensor of = at::embedding(embedding_, tokens);
  if (!shape_.scale_embeddings) return of;
  // transformers rounds the factor to the dtype of the weights, too.
  const at::Tensor factor =
      at::scalar_tensor(std::sqrt(static_cast<double>(shape_.dim)), at::TensorOptions(of.scalar_type()));
  return of.mul_(factor.item<double>());
}

namespace {

// Passes tensors on, and calls a function in the backward when their gradients have arrived.
class OnTheWayBack : public torch::autograd::Function<OnTheWayBack> {
 public:
  struct Held : torch::CustomClassHolder {
    explicit Held(std::function<void()> function) : call(std::move(function)) {}
    const std::function<void()> call;
  };

  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, at::TensorList tensors,
                                                const c10::intrusive_ptr<Held>& held) {
    context->set_materialize_grads(false);
    context->saved_data["held"] = c10::IValue::make_capsule(held);
    return tensors.vec();
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    c10::static_intrusive_pointer_cast<Held>(context->saved_data["held"].toCapsule())->call();
    gradients.emplace_back();  // the gradient of `held`
    return gradients;
  }
};

}  // namespace

// Autograd runs the node after every node that was made later and whose gradients are ready, so after all that read the
// output's weights or add to their gradients.
void Model::pass_from(size_t place, std::vector<at::Tensor>& made) const {
  if (use_ == nullptr || !at::GradMode::is_enabled()) return;
  const auto call = [use = use_, place, output = output_place(shape_.layers)] {
    if (place + 1 == output) use->after_backward(output);
    use->before_backward(place);
  };
  made = OnTheWayBack::apply(at::TensorList(made), c10::make_intrusive<OnTheWayBack::Held>(call));
}

at::Tensor Model::logits(const at::Tensor& tokens, const RotaryTables& tables, const Attend& attend,
                         bool last_only) const {
  const at::Tensor read = hidden(tokens, tables, attend, last_only);
  const size_t output = output_place(shape_.layers);
  if (use_ != nullptr) use_->before_forward(output);
  at::Tensor logits = linear_layer(read, head_, at::Tensor());
  if (use_ != nullptr) use_->after_forward(output);
  return logits;
}

void Model::visit_wide_logits(const at::Tensor& hidden, int64_t rows, const LogitsVisitor& visit) const {
  const c10::AutoGradMode no_grad(false);
  const size_t output = output_place(shape_.layers);
  if (use_ != nullptr) use_->before_forward(output);
  for (int64_t first = 0; first < hidden.size(0); first += rows) {
    visit(first, wide_product(hidden.narrow(0, first, std::min(rows, hidden.size(0) - first)), head_.t()));
  }
  if (use_ != nullptr) use_->after_forward(output);
}

at::Tensor Model::wide_logits(const at::Tensor& hidden) const {
  at::Tensor all;
  const int64_t rows = std::max<int64_t>(1, hidden.size(0));
  visit_wide_logits(hidden, rows, [&](int64_t /*first*/, const at::Tensor& logits) { all = logits; });
  return all.defined() ? all
                       : at::empty({0, shape_.vocab}, hidden.options().dtype(at::toOpMathType(hidden.scalar_type())));
}

at::Tensor Model::loss_of(const at::Tensor& hidden, const at::Tensor& targets, double scale,
                          const at::Tensor& weights) const {
  const size_t output = output_place(shape_.layers);
  if (use_ != nullptr) use_->before_forward(output);
  std::vector<at::Tensor> loss = {linear_cross_entropy_sum(hidden, head_, targets, scale, 0, weights)};
  if (use_ != nullptr) use_->after_forward(output);
  pass_from(output, loss);
  return loss[0];
}

at::Tensor Model::loss(const at::Tensor& tokens, const at::Tensor& targets, const RotaryTables& tables,
                       const Attend& attend, double scale, const at::Tensor& weights) const {
  return loss_of(hidden(tokens, tables, attend), targets, scale, weights);
}

at::Tensor Model::hidden(const at::Tensor& tokens, const RotaryTables& tables, const Attend& attend,
                         bool last_only) const {
  const int64_t batch = tokens.size(0);
  const int64_t n = tokens.size(1);
  const LayerSetting setting{.shape = shape_,
                             .tables = tables,
                             .batch = batch,
                             .recompute = recompute_,
                             .tile = tile_ > 0 ? tile_ : tile_rows(shape_, {parameters_.dtype(), embedding_.is_cuda()}),
                             .offload = recompute_ ? offload_ : nullptr,
                             .kept = kept_,
                             .use = use_};
  // Nothing is left of a forward whose backward did not run.
  if (setting.offload != nullptr && at::GradMode::is_enabled()) setting.offload->clear();
  if (kept_ != nullptr && at::GradMode::is_enabled()) kept_->clear();
  if (use_ != nullptr) use_->before_forward(kEmbeddingPlace);
  std::vector<at::Tensor> stream = {embedded(tokens.reshape({batch * n}))};  // and what is added to it
  if (use_ != nullptr) use_->after_forward(kEmbeddingPlace);
  pass_from(kEmbeddingPlace, stream);
  for (size_t i = 0; i < layers_.size(); ++i) {
    at::Tensor delta = stream.size() > 1 ? std::move(stream[1]) : at::Tensor();
    stream =
        decoder_layer(setting, layers_[i], static_cast<int64_t>(i), attend, std::move(stream[0]), std::move(delta));
  }
  if (setting.offload != nullptr) setting.offload->settle();
  if (last_only) {
    for (at::Tensor& t : stream) t = t.view({batch, n, shape_.dim}).select(1, n - 1).contiguous();
  }
  std::vector<at::Tensor> read = {add_rms_norm(stream[0], stream[1], norm_, shape_.norm_eps).y};
  const size_t last = output_place(shape_.layers) - 1;
  if (use_ != nullptr) use_->after_forward(last);
  pass_from(last, read);
  return read[0];
}

}  // namespace annulus
