// See projected_attention.h.
#include "attention/modules/projected_attention.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/linear.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "attention/execution/planned_call.h"
#include "attention/pattern/pattern.h"

namespace annulus {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What passes from forward to backward, as an opaque value of the node: the forward's output without its tensors.
// Before the forward, only the call.
struct Held : torch::CustomClassHolder {
  Held(ProjectionPlan p, const AttentionCall& call) : plan(std::move(p)) {
    output.call = call;
    output.call.require_kept();
  }
  const PatternSpec& pattern() const { return output.call.settings().request.pattern; }
  const ProjectionPlan plan;
  AttentionOutput output;
};

using MaybeTensor = std::optional<at::Tensor>;
MaybeTensor maybe(const at::Tensor& t) { return t.defined() ? MaybeTensor(t) : std::nullopt; }

ProjectionWeights weights_of(const at::Tensor* w) { return {w[0], w[1], w[2], w[3], w[4], w[5]}; }

// t divided by output_divisor; the tensor itself if that is 1.
at::Tensor divided(const at::Tensor& t, const PatternSpec& pattern) {
  const int64_t divisor = output_divisor(pattern);
  return divisor == 1 ? t : t.div(static_cast<double>(divisor));
}

constexpr size_t kInputs = 8;  // x, memory and six weights, whose gradients pass through the projections

class ProjectedAttention : public torch::autograd::Function<ProjectedAttention> {
 public:
  // memory: empty if it is x.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const MaybeTensor& memory,
                            const at::Tensor& q, const MaybeTensor& q_bias, const at::Tensor& k,
                            const MaybeTensor& k_bias, const at::Tensor& v, const MaybeTensor& v_bias,
                            const MaybeTensor& sinks, const c10::intrusive_ptr<Held>& held) {
    const auto plain = [](const MaybeTensor& t) { return t ? *t : at::Tensor(); };
    const ProjectionWeights weights{q, plain(q_bias), k, plain(k_bias), v, plain(v_bias)};
    AttentionOutput result;
    {
      const Projected p = project(x, memory ? *memory : x, weights, held->plan);
      result = attention_forward(p.q, p.k, p.v, held->output.call, plain(sinks));
    }
    held->output = result.with({}, {}, {}, {}, {});
    held->output.own_keys = Finite::kUnknown;  // the backward computes the keys again
    context->save_for_backward({x, plain(memory), q, plain(q_bias), k, plain(k_bias), v, plain(v_bias), result.out,
                                result.lse, result.saved_k, result.saved_v, plain(sinks)});
    context->saved_data["held"] = c10::IValue::make_capsule(held);
    // If `out` is returned itself, autograd sees that a caller changed it, and the backward refuses.
    return divided(result.out, held->pattern());
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const auto held = c10::static_intrusive_pointer_cast<Held>(context->saved_data["held"].toCapsule());
    std::array<at::Tensor, kInputs> inputs;
    for (size_t i = 0; i < kInputs; ++i) {
      if (saved[i].defined()) inputs[i] = saved[i].detach().requires_grad_();
    }
    Projected p;
    {
      const at::AutoGradMode with_gradients(true);
      p = project(inputs[0], inputs[1].defined() ? inputs[1] : inputs[0], weights_of(&inputs[2]), held->plan);
    }
    const AttentionGradients d =
        attention_backward(divided(grads[0], held->pattern()), p.q.detach(), p.k.detach(), p.v.detach(),
                           held->output.with(saved[8], saved[9], saved[10], saved[11], saved[12]));
    variable_list wanted;
    std::vector<size_t> where;
    size_t edge = 0;  // edge of the node; inputs that were not given have none
    for (size_t i = 0; i < kInputs; ++i) {
      if (!inputs[i].defined() || !context->needs_input_grad(edge++)) continue;
      wanted.push_back(inputs[i]);
      where.push_back(i);
    }
    variable_list result(kInputs + 2);
    result[kInputs] = d.dsinks;
    if (wanted.empty()) return result;
    const variable_list got = torch::autograd::grad({p.q, p.k, p.v}, wanted, {d.dq, d.dk, d.dv});
    for (size_t i = 0; i < where.size(); ++i) result[where[i]] = got[i];
    return result;
  }
};

at::Tensor heads_of(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, int64_t heads,
                    int64_t head_dim) {
  return at::linear(x, weight, maybe(bias)).view({x.size(0), x.size(1), heads, head_dim});
}

at::Tensor turned(const at::Tensor& x, const RotaryTable& table) {
  return table.cosine.defined() ? rotate(x, table) : x;
}

}  // namespace

Projected project(const at::Tensor& x, const at::Tensor& memory, const ProjectionWeights& w,
                  const ProjectionPlan& plan) {
  return {turned(heads_of(x, w.q, w.q_bias, plan.heads, plan.head_dim), plan.query_rotary),
          turned(heads_of(memory, w.k, w.k_bias, plan.kv_heads, plan.head_dim), plan.key_rotary),
          heads_of(memory, w.v, w.v_bias, plan.kv_heads, plan.head_dim)};
}

at::Tensor projected_attention(const at::Tensor& x, const at::Tensor& memory, const ProjectionWeights& w,
                               const ProjectionPlan& plan, const AttentionCall& call, const at::Tensor& sinks) {
  return ProjectedAttention::apply(x, memory.is_same(x) ? std::nullopt : maybe(memory), w.q, maybe(w.q_bias), w.k,
                                   maybe(w.k_bias), w.v, maybe(w.v_bias), maybe(sinks),
                                   c10::make_intrusive<Held>(plan, call));
}

}  // namespace annulus
