// See model.h.
#include "runtime/model/model.h"

#include <ATen/OpMathType.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/embedding.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/model/products.h"
#include "runtime/model/recompute.h"

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
    layers_.push_back({.attention_norm = leaf(true, "input_layernorm.weight"),
                       .qkv = leaf(true, "self_attn.q_proj.weight", 3),
                       .qkv_bias = leaf(shape.qkv_bias, "self_attn.q_proj.bias", 3),
                       .q_norm = leaf(shape.qk_norm, "self_attn.q_norm.weight"),
                       .k_norm = leaf(shape.qk_norm, "self_attn.k_norm.weight"),
                       .out = leaf(true, "self_attn.o_proj.weight"),
                       .out_bias = leaf(shape.out_bias, "self_attn.o_proj.bias"),
                       .mlp_norm = leaf(true, "post_attention_layernorm.weight"),
                       .gate_up = leaf(true, "mlp.gate_proj.weight", 2),
                       .gate_up_bias = leaf(shape.mlp_bias, "mlp.gate_proj.bias", 2),
                       .down = leaf(true, "mlp.down_proj.weight"),
                       .down_bias = leaf(shape.mlp_bias, "mlp.down_proj.bias")});
  }
  norm_ = p.leaf("model.norm.weight");
  head_ = shape.tie_embeddings ? embedding_ : p.leaf("lm_head.weight");
}

namespace {

constexpr std::string_view kWeightGradient = "gradient of the weight";
constexpr std::string_view kWeightsOfPlaces = "weights and gradients that are not there all the time";

// x [rows, in] times a matrix [out, in]. `saves`: nothing else keeps x.
Part linear_charges(std::string_view name, int64_t rows, int64_t in, int64_t out, bool saves, const Computes& on) {
  const int64_t e = on.element();
  return {name,
          {{"input", saves ? rows * in * e : 0, When::kKept},
           {"result", rows * out * e, When::kForward},
           {kGivenGradient, rows * out * e, When::kBackward},
           {"gradient of the input", rows * in * e, When::kBackward},
           {kWeightGradient, out * in * e, When::kBackward}}};
}

// Removes the charges of this name from the parts and returns their sum: bytes that are held all the time while the
// parts run again and backwards.
int64_t taken_off(std::string_view what, std::vector<Part>& parts) {
  int64_t bytes = 0;
  for (Part& part : parts) {
    for (Charge& charge : part.charges) {
      if (charge.what == what) bytes += std::exchange(charge.bytes, 0);
    }
  }
  return bytes;
}

}  // namespace

void add_model_charges(const ModelShape& s, int64_t rows, const Computes& on, bool recompute,
                       const std::vector<Part>& attention, const std::vector<PlaceCharges>& places, StepCharges& step) {
  const int64_t e = on.element(), stream = rows * s.dim * e, heads = s.q_width() + 2 * s.kv_width();
  const Charge residual{"gradient of the residual stream", stream, When::kBackward};
  const auto taken_at = [&](size_t place) { return place < places.size() ? places[place] : PlaceCharges{}; };
  const auto at_place = [&](size_t place, Part part) {
    part.charges.push_back({kWeightsOfPlaces, taken_at(place).forward, When::kForward});
    part.charges.push_back({kWeightsOfPlaces, taken_at(place).backward, When::kBackward});
    return part;
  };
  // Adds parts that keep `inputs`. The gradient of the residual stream is held from the backward of the last part,
  // which may receive it, to that of their norm, which receives it, too. With recomputation, `results` and the weights'
  // gradients are held during the whole backward of the parts.
  const auto add = [&](size_t place, std::vector<Part> parts, int64_t inputs, int64_t results, bool given_to_last) {
    if (!recompute) {
      const size_t norm = parts[0].name == kNormPart ? 0 : 1;
      for (size_t i = norm + 1; i < parts.size(); ++i) {
        if (!given_to_last || i + 1 < parts.size()) parts[i].charges.push_back(residual);
      }
      if (!given_to_last) parts[0].charges.push_back({kWeightsKept, taken_at(place).kept, When::kKept});
      for (Part& part : parts) step.then(at_place(place, std::move(part)));
      return;
    }
    // In the backward, in which the forward runs again, the place takes what it takes in the forward.
    const PlaceCharges taken = taken_at(place);
    for (Part& part : parts) {
      part.charges.push_back({kWeightsOfPlaces, taken.forward, When::kForward});
      part.charges.push_back({kWeightsOfPlaces, taken.forward, When::kBackward});
    }
    // What comes from outside is held all the time; the parts between pass on what they make.
    for (Part& part : parts) {
      if (part.name != kNormPart && &part != &parts.back()) continue;
      for (Charge& charge : part.charges) {
        if (charge.what == kGivenGradient) charge.bytes = 0;
      }
    }
    const int64_t weights = taken_off(kWeightGradient, parts);
    const int64_t given = given_to_last ? stream : stream + results;
    step.then_recomputed({"recomputed",
                          {{"inputs", inputs, When::kKept},
                           {kWeightsKept, given_to_last ? 0 : taken.kept, When::kKept},
                           {"results", results, When::kBackward},
                           {"gradients of the results", given, When::kBackward},
                           {"gradients of the weights", weights, When::kBackward},
                           {kWeightsOfPlaces, taken.backward - taken.forward, When::kBackward}}},
                         std::move(parts));
  };
  const auto begin = [&](size_t place) {
    if (taken_at(place).ends > 0)
      step.then({"sums of gradients", {{kWeightsOfPlaces, taken_at(place).ends, When::kBackward}}});
  };
  begin(0);
  step.then(at_place(0, {"embedding",
                         {{"result", stream, When::kForward},
                          {kGivenGradient, stream, When::kBackward},
                          {kWeightGradient, s.vocab * s.dim * e, When::kBackward}}}));
  for (size_t i = 0; i < attention.size(); ++i) {
    const size_t place = i + 1;
    begin(place);
    // The first norm adds nothing. Except with loops, its sum is its input, which the parts after attention keep.
    const int64_t inputs = i > 0 ? 2 * stream : on.loops() ? stream : 0;
    std::vector<Part> to_heads = {norm_charges(rows, s.dim, /*with_sum=*/true, on),
                                  linear_charges("projection to heads", rows, s.dim, heads, /*saves=*/true, on)};
    if (s.qk_norm) to_heads.push_back(head_norm_charges(rows, s.heads, s.kv_heads, s.head_dim(), on));
    to_heads.push_back(rotary_charges(rows, s.heads, s.kv_heads, s.head_dim(), on));
    add(place, std::move(to_heads), inputs, /*results=*/rows * heads * e, /*given_to_last=*/false);
    Part attended = attention[i];
    attended.charges.push_back(residual);
    step.then(at_place(place, std::move(attended)));
    add(place,
        {linear_charges("projection of heads", rows, s.q_width(), s.dim, /*saves=*/false, on),
         norm_charges(rows, s.dim, /*with_sum=*/true, on),
         linear_charges("projection to gate and up", rows, s.dim, 2 * s.ffn, /*saves=*/true, on),
         swiglu_charges(rows, s.ffn, on), linear_charges("projection down", rows, s.ffn, s.dim, /*saves=*/true, on)},
        /*inputs=*/stream, /*results=*/stream, /*given_to_last=*/true);
  }
  step.then(at_place(attention.size(), norm_charges(rows, s.dim, /*with_sum=*/false, on)));
  begin(attention.size() + 1);
  step.then(at_place(attention.size() + 1, loss_charges(rows, s.dim, s.vocab, on)));
}

int64_t forward_bytes(const ModelShape& s, int64_t rows, const Computes& on) {
  return rows * (4 * s.dim + 3 * s.ffn) * on.element();  // the stream in two parts, normed and attended; the MLP
}

RotaryTable Model::rotary(const at::Tensor& positions) const {
  return make_rotary_table(positions, shape_.rotary(), at::toOpMathType(parameters_.dtype()), embedding_.device());
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
// weights of the next place or add to their gradients.
void Model::pass_from(size_t place, std::vector<at::Tensor>& between) const {
  if (use_ == nullptr || !at::GradMode::is_enabled()) return;
  const auto call = [use = use_, place, is_last = place > layers_.size()] {
    if (!is_last) use->after_backward(place + 1);
    use->before_backward(place);
  };
  between = OnTheWayBack::apply(at::TensorList(between), c10::make_intrusive<OnTheWayBack::Held>(call));
}

at::Tensor Model::logits(const at::Tensor& tokens, const RotaryTable& table, const Attend& attend,
                         bool last_only) const {
  const at::Tensor read = hidden(tokens, table, attend, last_only);
  const size_t output = layers_.size() + 1;
  if (use_ != nullptr) use_->before_forward(output);
  at::Tensor logits = linear_layer(read, head_, at::Tensor());
  if (use_ != nullptr) use_->after_forward(output);
  return logits;
}

at::Tensor Model::wide_logits(const at::Tensor& hidden) const {
  const c10::AutoGradMode no_grad(false);
  return wide_product(hidden, head_.t());
}

at::Tensor Model::loss_of(const at::Tensor& hidden, const at::Tensor& targets, double scale) const {
  const size_t output = layers_.size() + 1;
  if (use_ != nullptr) use_->before_forward(output);
  std::vector<at::Tensor> loss = {linear_cross_entropy_sum(hidden, head_, targets, scale)};
  if (use_ != nullptr) use_->after_forward(output);
  pass_from(output, loss);
  return loss[0];
}

at::Tensor Model::loss(const at::Tensor& tokens, const at::Tensor& targets, const RotaryTable& table,
                       const Attend& attend, double scale) const {
  return loss_of(hidden(tokens, table, attend), targets, scale);
}

at::Tensor Model::hidden(const at::Tensor& tokens, const RotaryTable& table, const Attend& attend,
                         bool last_only) const {
  const int64_t batch = tokens.size(0);
  const int64_t n = tokens.size(1);
  const auto run = [&](const TensorFunction& f, const std::vector<at::Tensor>& inputs) {
    return recompute_ && at::GradMode::is_enabled() ? recomputed(f, inputs) : f(inputs);
  };
  // These functions capture what they use by value, because they may run again in the backward. The residual stream x
  // is [batch * n, dim]; `delta` is what the next norm adds to it first.
  const TensorFunction before_attention = [shape = shape_, table, batch](const std::vector<at::Tensor>& in) {
    enum { kStream, kDelta, kNorm, kQkv, kQkvBias, kQNorm, kKNorm };
    const Normed a = add_rms_norm(in[kStream], in[kDelta], in[kNorm], shape.norm_eps);
    at::Tensor qkv = linear_layer(a.y, in[kQkv], in[kQkvBias]);
    if (shape.qk_norm) qkv = head_norm(qkv, in[kQNorm], in[kKNorm], shape.heads, shape.kv_heads, shape.norm_eps);
    const Heads heads = rotary_split(qkv, table, shape.heads, shape.kv_heads);
    // With a table of all rows, rotary_split returns them as one.
    const auto rows = [batch](const at::Tensor& t) {
      return t.size(0) == batch ? t : t.view({batch, -1, t.size(2), t.size(3)});
    };
    return std::vector<at::Tensor>{a.sum, rows(heads.q), rows(heads.k), rows(heads.v)};
  };
  const TensorFunction after_attention = [shape = shape_](const std::vector<at::Tensor>& in) {
    enum { kStream, kAttended, kOut, kOutBias, kNorm, kGateUp, kGateUpBias, kDown, kDownBias };
    const int64_t rows = in[kStream].size(0);
    const at::Tensor attended = linear_layer(in[kAttended].reshape({rows, shape.q_width()}), in[kOut], in[kOutBias]);
    const Normed m = add_rms_norm(in[kStream], attended, in[kNorm], shape.norm_eps);
    const at::Tensor gate_up = linear_layer(m.y, in[kGateUp], in[kGateUpBias]);
    return std::vector<at::Tensor>{m.sum, linear_layer(swiglu(gate_up), in[kDown], in[kDownBias])};
  };
  if (use_ != nullptr) use_->before_forward(0);
  std::vector<at::Tensor> stream = {at::embedding(embedding_, tokens.reshape({batch * n}))};  // and what is added to it
  if (use_ != nullptr) use_->after_forward(0);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    pass_from(i, stream);
    if (use_ != nullptr) use_->before_forward(i + 1);
    const at::Tensor delta = stream.size() > 1 ? stream[1] : at::Tensor();
    const std::vector<at::Tensor> a = run(before_attention, {stream[0], delta, layer.attention_norm, layer.qkv,
                                                             layer.qkv_bias, layer.q_norm, layer.k_norm});
    const at::Tensor attended = attend(a[1], a[2], a[3], static_cast<int64_t>(i));
    stream = run(after_attention, {a[0], attended, layer.out, layer.out_bias, layer.mlp_norm, layer.gate_up,
                                   layer.gate_up_bias, layer.down, layer.down_bias});
    if (use_ != nullptr && i + 1 < layers_.size()) use_->after_forward(i + 1);
  }
  if (last_only) {
    for (at::Tensor& t : stream) t = t.view({batch, n, shape_.dim}).select(1, n - 1).contiguous();
  }
  std::vector<at::Tensor> read = {add_rms_norm(stream[0], stream[1], norm_, shape_.norm_eps).y};
  if (use_ != nullptr) use_->after_forward(layers_.size());
  pass_from(layers_.size(), read);
  return read[0];
}

}  // namespace annulus
