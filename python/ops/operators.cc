// torch.ops.annulus.attention: exact attention for PyTorch users (docs/reference/python.md). It works over the ranks of
// a PyTorch process group, or over those of mpirun if it started Python; q, k and v are then this rank's rows of the
// sequence.
//
// Users call `attention` or `attention_with_lse`. Their autograd node calls the operators attention_forward and
// attention_backward, which torch.compile treats as opaque: at compile time their tensors have sizes but no content.
// The backward takes from the forward only tensors, so everything that PyTorch does with saved tensors works with them:
// they may be copied, offloaded or recomputed. An annulus::Error becomes a RuntimeError with the same text.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/execution/cudnn_workaround.h"
#include "attention/execution/planned_call.h"
#include "attention/execution/select_blocks.h"
#include "attention/execution/sinks.h"
#include "attention/proof/plans.h"
#include "comm/agreement.h"
#include "common/checksum.h"
#include "common/error.h"
#include "memory/caches.h"
#include "python/ops/call.h"
#include "python/ops/counts.h"
#include "python/ops/lse_gradient.h"
#include "python/ops/masks.h"
#include "python/ops/world.h"

namespace annulus::torch_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<Tensor>;

// The results of attention_forward: out [batch, n, heads, head size], not divided by the pattern's divisor; lse [batch,
// heads, n]; saved_k and saved_v, which the plan keeps for the backward, or [0] if it keeps nothing; selected, the
// digest of the blocks that an adaptive pattern selected, uint8 [16], or [0] for other patterns; and number, int64
// without dimensions: that of this call (Communicator::number_call). It stays on the CPU, because a backward that read
// it from a GPU would wait for the GPU.
using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // of q, k, v and the sinks; the last [0] without
using WithLse = std::tuple<Tensor, Tensor>;

constexpr int64_t kDigestBytes = sizeof(Digest);

// Keeps the plans of adaptive patterns from a forward to its backward. Those of other patterns are found by their
// requests.
std::shared_ptr<const RankPlan> selected_plan(const PlanRequest& selected, int rank,
                                              const std::function<std::shared_ptr<const RankPlan>()>& make) {
  static NamedCache<std::shared_ptr<const RankPlan>, PlanKey> cache("selected programs");
  return *cache.get({selected, rank}, make, [](const auto& plan) { return plan_bytes(*plan); });
}

// ---- attention_forward

// If one rank had no backward, the others would wait for it in theirs.
Field gradient_term(bool differentiable) {
  return {
      "whether q, k, v or the sinks require a gradient (if none does, there is no backward, which all ranks make "
      "together: let one of them require a gradient on every rank, or none on any)",
      differentiable ? "yes" : "no"};
}

Forward forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens,
                const MaybeTensor& sinks, const Settings& settings, bool keep, bool differentiable) {
  const Turn turn = take_turn(settings.group, q);
  const c10::OptionalDeviceGuard guard(at::device_of(q));
  Direction direction{[&]() -> std::vector<Field> { return {{"call", "forward"}, gradient_term(differentiable)}; }};
  const AttentionCall call = make_call(q, k, v, cu_seqlens, sinks, settings, keep, direction, *turn.comm);
  AttentionStats stats;
  const AttentionOutput result = attention_forward(q, k, v, call, sinks.value_or(Tensor()), &stats);
  count(settings.group, &GroupCounts::forward, stats);
  const bool adaptive = is_adaptive(call.request.pattern);
  Tensor selected = at::empty({adaptive ? kDigestBytes : 0}, at::kByte);
  if (adaptive) {
    PlanRequest request = call.request;
    request.pattern = result.program().request.pattern;
    selected_plan(request, call.comm->rank(), [&] { return result.call.plan(); });
    std::memcpy(selected.mutable_data_ptr<uint8_t>(), &result.call.plan()->digest, kDigestBytes);
  }
  const auto kept = [&](const Tensor& saved) { return saved.defined() ? saved : at::empty({0}, q.options()); };
  return {result.out.contiguous(), result.lse.contiguous(), kept(result.saved_k),
          kept(result.saved_v),    selected.to(q.device()), at::full({}, result.number, at::kLong)};
}

Forward forward_meta(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens,
                     const MaybeTensor& sinks, const Settings& settings, bool keep, bool) {
  require_tensors(q, k, v, cu_seqlens, sinks);
  // A single rank holds only its own keys and values, so nothing is kept.
  require(
      !keep || place_in(settings.group).size == 1,
      "attention_forward: over several ranks keep = True is for tensors with content, because the plan determines how "
      "much is kept; pass keep = False");
  const at::ScalarType type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1)}, q.options().dtype(type)),
          at::empty({0}, q.options()),
          at::empty({0}, q.options()),
          at::empty({is_adaptive(*pattern_of(settings.pattern)) ? kDigestBytes : 0}, q.options().dtype(at::kByte)),
          at::empty({}, q.options().dtype(at::kLong))};
}

// ---- attention_backward

// Repeats the forward's selection of blocks, which depends only on the bits of q and k. Collective.
std::shared_ptr<const RankPlan> select_again(const Tensor& q, const Tensor& k, const Tensor& selected,
                                             const AttentionCall& call) {
  const PlanRequest request = select_blocks(call.request, q, k, *call.comm, call.label);
  const int rank = call.comm->rank();
  std::shared_ptr<const RankPlan> plan;
  together(*call.comm, {call.label, 0}, [&] {
    plan = selected_plan(request, rank,
                         [&] { return std::make_shared<const RankPlan>(request, make_program(request, rank)); });
    require(selected.defined() && selected.scalar_type() == at::kByte && selected.numel() == kDigestBytes &&
                std::memcmp(selected.cpu().contiguous().const_data_ptr<uint8_t>(), &plan->digest, kDigestBytes) == 0,
            "attention_backward: q and k select other blocks than the forward did: pass the q and k that it took and "
            "the `selected` that it returned, unchanged");
  });
  return plan;
}

struct Saved {
  Tensor out, lse, k, v, selected, number;
};

void require_lse_gradient(const Tensor& dlse, const Tensor& q, const Settings& settings) {
  const at::ScalarType type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  require(dlse.sizes() == at::IntArrayRef{q.size(0), q.size(2), q.size(1)} && dlse.scalar_type() == type &&
              dlse.device() == q.device(),
          "attention_backward: the gradient of lse must be like lse, [batch, heads, n] of the accumulator's dtype");
  require(settings.dropout == 0,
          "with dropout lse has no gradient, because lse is that of the probabilities before any are dropped: pass "
          "dropout = 0, or use lse.detach()");
}

Gradients backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Saved& saved,
                   const MaybeTensor& dlse, const MaybeTensor& cu_seqlens, const MaybeTensor& sinks,
                   const Settings& settings, bool keep) {
  const Turn turn = take_turn(settings.group, q);
  const c10::OptionalDeviceGuard guard(at::device_of(q));
  const bool has_dlse = dlse && dlse->defined();
  Direction direction{[&]() -> std::vector<Field> {
                        if (has_dlse) require_lse_gradient(*dlse, q, settings);
                        return {{"call", "backward"}, backward_term(number_of(saved.number))};
                      },
                      has_dlse};
  AttentionCall call = make_call(q, k, v, cu_seqlens, sinks, settings, keep, direction, *turn.comm);
  std::shared_ptr<const RankPlan> selected;
  if (is_adaptive(call.request.pattern)) selected = select_again(q, k, saved.selected, call);
  if (direction.lse_gradient) call.scale = call.scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))));
  BackwardTensors t{dout,
                    q,
                    k,
                    v,
                    {PlannedCall(call, nullptr, std::move(selected)), Finite::kUnknown, number_of(saved.number),
                     saved.out, saved.lse, saved.k, saved.v, sinks.value_or(Tensor())}};
  if (direction.lse_gradient) {
    together(*turn.comm, {call.label, 0}, [&] { t = with_lse_gradient(t, has_dlse ? *dlse : Tensor()); });
  }
  AttentionStats stats;
  const AttentionGradients d = attention_backward(t.dout, t.q, t.k, t.v, std::move(t.forward), &stats);
  count(settings.group, &GroupCounts::backward, stats);
  const auto own = [&](const Tensor& gradient) { return gradient.narrow(-1, 0, q.size(3)).contiguous(); };
  Tensor dsinks = call.sinks ? d.dsinks : at::empty({0}, q.options());
  if (call.sinks && has_dlse)
    dsinks = dsinks + sink_gradients_of_lse(*dlse, saved.lse, *sinks).to(dsinks.scalar_type());
  return {own(d.dq), own(d.dk), own(d.dv), dsinks};
}

Gradients backward_meta(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Saved& saved,
                        const MaybeTensor& dlse, const MaybeTensor& cu_seqlens, const MaybeTensor& sinks,
                        const Settings&, bool) {
  require_tensors(q, k, v, cu_seqlens, sinks);
  for (const Tensor* t : {&dout, &saved.out, &saved.lse, &saved.k, &saved.v, &saved.selected}) {
    require(t->device() == q.device(), "attention_backward: all tensors must be on one device, but one is on " +
                                           t->device().str() + " and q on " + q.device().str());
  }
  require(!dlse || !dlse->defined() || dlse->device() == q.device(),
          "attention_backward: the gradient of lse must be on the device of q");
  const auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  return {like(q), like(k), like(v), sinks && sinks->defined() ? like(*sinks) : at::empty({0}, q.options())};
}

// ---- The operators' signatures, and calls through the dispatcher.

template <typename... P>
struct Operators {
  using ForwardSignature = Forward(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&,
                                   P..., bool, bool);
  using BackwardSignature = Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                      const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, P..., bool);

  template <auto function>
  static Forward run_forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens,
                             const MaybeTensor& sinks, P... p, bool keep, bool differentiable) {
    return function(q, k, v, cu_seqlens, sinks, Settings{std::move(p)...}, keep, differentiable);
  }
  template <auto function>
  static Gradients run_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                const Tensor& out, const Tensor& lse, const Tensor& saved_k, const Tensor& saved_v,
                                const Tensor& selected, const Tensor& number, const MaybeTensor& dlse,
                                const MaybeTensor& cu_seqlens, const MaybeTensor& sinks, P... p, bool keep) {
    return function(dout, q, k, v, Saved{out, lse, saved_k, saved_v, selected, number}, dlse, cu_seqlens, sinks,
                    Settings{std::move(p)...}, keep);
  }
  template <auto function>
  static Tensor run_attention(const Tensor& q, const Tensor& k, const Tensor& v, P... p, const MaybeTensor& cu_seqlens,
                              const MaybeTensor& sinks) {
    return std::get<0>(function(q, k, v, cu_seqlens, sinks, Settings{std::move(p)...}));
  }
  template <auto function>
  static WithLse run_attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, P... p,
                                        const MaybeTensor& cu_seqlens, const MaybeTensor& sinks) {
    return function(q, k, v, cu_seqlens, sinks, Settings{std::move(p)...});
  }

  static Forward forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens,
                         const MaybeTensor& sinks, const Settings& s, bool keep, bool differentiable) {
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow("annulus::attention_forward", "").typed<ForwardSignature>();
    return handle.call(q, k, v, cu_seqlens, sinks, s.pattern, s.group, s.layout, s.schedule, s.within, s.scale,
                       s.dropout, s.seed, s.step, s.layer, s.first_row, s.query_offset, s.softcap, keep,
                       differentiable);
  }
  static Gradients backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Saved& saved,
                            const MaybeTensor& dlse, const MaybeTensor& cu_seqlens, const MaybeTensor& sinks,
                            const Settings& s, bool keep) {
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow("annulus::attention_backward", "").typed<BackwardSignature>();
    return handle.call(dout, q, k, v, saved.out, saved.lse, saved.k, saved.v, saved.selected, saved.number, dlse,
                       cu_seqlens, sinks, s.pattern, s.group, s.layout, s.schedule, s.within, s.scale, s.dropout,
                       s.seed, s.step, s.layer, s.first_row, s.query_offset, s.softcap, keep);
  }
};
using Ops = WithSettings<Operators>;

// ---- attention(q, k, v, ...) -> out and attention_with_lse(q, k, v, ...) -> (out, lse), with their autograd node.

Tensor divided(const Tensor& t, int64_t divisor) { return divisor == 1 ? t : t / static_cast<double>(divisor); }

WithLse attention_plain(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens,
                        const MaybeTensor& sinks, const Settings& settings) {
  const Forward result = Ops::forward(q, k, v, cu_seqlens, sinks, settings, /*keep=*/false, /*differentiable=*/false);
  return {divided(std::get<0>(result), output_divisor(*pattern_of(settings.pattern))), std::get<1>(result)};
}

// Whether a tensor has content. The tensors with which torch.compile traces have none, and the sizes of results must be
// known without a plan.
bool has_content(const Tensor& t) {
  return !t.is_meta() && !t.key_set().has(c10::DispatchKey::Python) &&
         !t.key_set().has(c10::DispatchKey::Functionalize);
}

struct SavedSettings : torch::CustomClassHolder {
  SavedSettings(const Settings& s, bool k) : settings(s), keep(k), masks(known_masks(*pattern_of(s.pattern))) {}
  const Settings settings;
  const bool keep;
  const std::vector<std::shared_ptr<const TokenMask>> masks;  // that the pattern names; the backward finds them again
};

class AttentionNode : public torch::autograd::Function<AttentionNode> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& q, const Tensor& k, const Tensor& v,
                               const MaybeTensor& cu_seqlens, const MaybeTensor& sinks, const Settings& settings,
                               bool differentiable) {
    const at::AutoDispatchBelowADInplaceOrView below;
    // A dispatch mode may run the operator with tensors without content beside the real ones and compare the sizes of
    // their results, as torch.library.opcheck does.
    const bool keep = has_content(q) && has_content(k) && has_content(v) && !c10::impl::dispatch_mode_enabled();
    const auto [out, lse, saved_k, saved_v, selected, number] =
        Ops::forward(q, k, v, cu_seqlens, sinks, settings, keep, differentiable);
    // Parsed after the forward, in which all ranks together refuse a pattern that cannot be parsed.
    const int64_t divisor = output_divisor(*pattern_of(settings.pattern));
    context->save_for_backward({q, k, v, out, lse, saved_k, saved_v, selected, number, cu_seqlens.value_or(Tensor()),
                                sinks.value_or(Tensor())});
    context->set_materialize_grads(false);
    context->saved_data["divisor"] = divisor;
    context->saved_data["settings"] = c10::IValue::make_capsule(c10::make_intrusive<SavedSettings>(settings, keep));
    return {divided(out, divisor), lse};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const auto with = c10::static_intrusive_pointer_cast<SavedSettings>(context->saved_data["settings"].toCapsule());
    const Tensor dout = grads[0].defined() ? divided(grads[0], context->saved_data["divisor"].toInt())
                                           : at::zeros_like(saved[3]);  // only lse has a gradient
    const auto maybe = [](const Tensor& t) { return t.defined() ? MaybeTensor(t) : std::nullopt; };
    const auto [dq, dk, dv, dsinks] =
        Ops::backward(dout, saved[0], saved[1], saved[2], {saved[3], saved[4], saved[5], saved[6], saved[7], saved[8]},
                      maybe(grads[1]), maybe(saved[9]), maybe(saved[10]), with->settings, with->keep);
    return {dq,       dk,      dv, Tensor(), saved[10].defined() ? dsinks : Tensor(),
            Tensor(), Tensor()};  // one for each input of forward
  }
};

WithLse attention_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens,
                           const MaybeTensor& sinks, const Settings& settings) {
  // PyTorch's node does not accept None and would raise on this rank only; the forward raises on all ranks.
  if (!q.defined() || !k.defined() || !v.defined()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return attention_plain(q, k, v, cu_seqlens, sinks, settings);
  }
  const bool differentiable = at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() ||
                                                             v.requires_grad() || (sinks && sinks->requires_grad()));
  const variable_list results = AttentionNode::apply(q, k, v, cu_seqlens, sinks, settings, differentiable);
  return {results[0], results[1]};
}

// ---- Gradients of attention_forward and attention_backward, which have none.

class WithoutGradient : public torch::autograd::Function<WithoutGradient> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList /*inputs*/,
                               const std::function<variable_list()>& run, const std::string& refusal) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["refusal"] = refusal;
    return run();
  }
  static variable_list backward(AutogradContext* context, const variable_list&) {
    throw Error(ErrorKind::kUsage, "torch", context->saved_data["refusal"].toStringRef());
  }
};

variable_list without_gradient(std::initializer_list<Tensor> inputs, const std::function<variable_list()>& run,
                               const char* refusal) {
  variable_list given;
  for (const Tensor& t : inputs) {
    if (t.defined()) given.push_back(t);  // autograd does not accept None; the operator does, and refuses it
  }
  return WithoutGradient::apply(at::TensorList(given), run, std::string(refusal));
}

Forward forward_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens,
                         const MaybeTensor& sinks, const Settings& settings, bool keep, bool differentiable) {
  const variable_list r = without_gradient(
      {q, k, v, sinks.value_or(Tensor())},
      [&]() -> variable_list {
        const auto [out, lse, saved_k, saved_v, selected, number] =
            Ops::forward(q, k, v, cu_seqlens, sinks, settings, keep, differentiable);
        return {out, lse, saved_k, saved_v, selected, number};
      },
      "attention_forward has no gradient of its own: call attention, whose autograd node calls attention_forward");
  return {r[0], r[1], r[2], r[3], r[4], r[5]};
}

Gradients backward_autograd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Saved& saved,
                            const MaybeTensor& dlse, const MaybeTensor& cu_seqlens, const MaybeTensor& sinks,
                            const Settings& settings, bool keep) {
  const variable_list r = without_gradient(
      {dout, q, k, v, saved.out, saved.lse, saved.k, saved.v, dlse.value_or(Tensor()), sinks.value_or(Tensor())},
      [&]() -> variable_list {
        const auto [dq, dk, dv, dsinks] = Ops::backward(dout, q, k, v, saved, dlse, cu_seqlens, sinks, settings, keep);
        return {dq, dk, dv, dsinks};
      },
      "attention has first derivatives only, but a gradient of its gradient was asked for (create_graph = True, a "
      "gradient penalty, a Hessian): where second derivatives are needed, compute attention by operators of PyTorch");
  return {r[0], r[1], r[2], r[3]};
}

}  // namespace

TORCH_LIBRARY(annulus, m) {
  avoid_wrong_gradients();  // as soon as the library is loaded, because PyTorch may call cuDNN before annulus does
  // `pattern` is written as in docs/explanation/attention.md: "{ kind = 'causal' }". q is [batch, n, heads, head size],
  // k and v are [batch, m, kv heads, head size]. `group` is the name of a process group; "" stands for the ranks of
  // mpirun, or the process alone. `seed`, `step`, `layer` and `first_row` (the global number of batch row 0) determine
  // dropout. Query i has the position i + `query_offset`. `cu_seqlens` has the [documents + 1] boundaries of documents
  // that attention does not cross, of the whole sequence and the same on all ranks. `softcap` c > 0 makes a score c
  // tanh(score / c). `sinks` [heads] are logits in the softmaxes' denominators (attention/execution/sinks.h); their
  // gradient is the part of this rank's queries. Forward and backward are collective.
  const auto define = [&](const std::string& schema) { m.def(schema.c_str(), {at::Tag::pt2_compliant_tag}); };
  const std::string settings =
      "str pattern, *, str group=\"\", str layout=\"contiguous\", str schedule=\"auto\", int within=0, "
      "float? scale=None, float dropout=0., SymInt seed=0, SymInt step=0, int layer=0, SymInt first_row=0, "
      "SymInt query_offset=0, float softcap=0., Tensor? cu_seqlens=None, Tensor? sinks=None";
  define("attention(Tensor q, Tensor k, Tensor v, " + settings + ") -> Tensor");
  // Also returns lse [batch, heads, n] in fp32, or fp64 for fp64 tensors: the natural logarithm of the sum of the
  // exponentials of a query's scaled scores, -inf for a query without keys. It has gradients unless there is dropout.
  define("attention_with_lse(Tensor q, Tensor k, Tensor v, " + settings + ") -> (Tensor out, Tensor lse)");
  // `keep` allows the plan to keep the keys and values held last for the backward; the plan determines their sizes.
  // `differentiable` says that a backward may follow, and must be the same on all ranks.
  const std::string given =
      "Tensor? cu_seqlens, Tensor? sinks, str pattern, str group, str layout, str schedule, int within, "
      "float? scale, float dropout, SymInt seed, SymInt step, int layer, SymInt first_row, SymInt query_offset, "
      "float softcap, bool keep";
  define("attention_forward(Tensor q, Tensor k, Tensor v, " + given +
         ", bool differentiable) -> (Tensor out, Tensor lse, Tensor saved_k, Tensor saved_v, Tensor selected, Tensor "
         "number)");
  define(
      "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor saved_k, Tensor "
      "saved_v, Tensor selected, Tensor number, Tensor? dlse, " +
      given + ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
}

// Registered for tensors of every kind, although only dense ones are accepted: a tensor that one rank cannot take, such
// as a sparse one, is refused inside the operator, where the other ranks learn of it.
TORCH_LIBRARY_IMPL(annulus, CompositeExplicitAutograd, m) {
  m.impl("attention", Ops::run_attention<attention_plain>);
  m.impl("attention_with_lse", Ops::run_attention_with_lse<attention_plain>);
  m.impl("attention_forward", Ops::run_forward<forward>);
  m.impl("attention_backward", Ops::run_backward<backward>);
}

TORCH_LIBRARY_IMPL(annulus, Meta, m) {
  m.impl("attention", Ops::run_attention<attention_plain>);
  m.impl("attention_with_lse", Ops::run_attention_with_lse<attention_plain>);
  m.impl("attention_forward", Ops::run_forward<forward_meta>);
  m.impl("attention_backward", Ops::run_backward<backward_meta>);
}

TORCH_LIBRARY_IMPL(annulus, Autograd, m) {
  m.impl("attention", Ops::run_attention<attention_autograd>);
  m.impl("attention_with_lse", Ops::run_attention_with_lse<attention_autograd>);
  m.impl("attention_forward", Ops::run_forward<forward_autograd>);
  m.impl("attention_backward", Ops::run_backward<backward_autograd>);
}

}  // namespace annulus::torch_ops
