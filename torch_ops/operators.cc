// torch.ops.annulus.attention: exact attention for PyTorch users (docs/embedding.md). It works over the ranks of a
// PyTorch process group, or over those of mpirun if it started Python; q, k and v are then this rank's rows of the
// sequence.
//
// Users call `attention`. Its autograd node calls the operators attention_forward and attention_backward, which
// torch.compile treats as opaque: at compile time their tensors have sizes but no content. The backward takes from the
// forward only tensors, so everything that PyTorch does with saved tensors works with them: they may be copied,
// offloaded or recomputed. An annulus::Error becomes a RuntimeError with the same text.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "attention/execution/attention.h"
#include "attention/execution/library_settings.h"
#include "attention/execution/select_blocks.h"
#include "attention/plan/traffic.h"
#include "comm/agreement.h"
#include "common/checksum.h"
#include "common/error.h"
#include "memory/caches.h"
#include "torch_ops/call.h"
#include "torch_ops/counts.h"
#include "torch_ops/world.h"

namespace annulus::torch_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<Tensor>;

// The results of attention_forward: out [batch, n, heads, head size], not divided by the pattern's divisor; lse [batch,
// heads, n]; saved_k and saved_v, which the plan keeps for the backward, or [0] if it keeps nothing; and selected, the
// digest of the blocks that an adaptive pattern selected, uint8 [16], or [0] for other patterns.
using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

constexpr int64_t kDigestBytes = sizeof(Digest);

Digest digest_of(const PlanRequest& selected) {
  const std::string text = selected.text();
  return digest(text.data(), text.size());
}

// Keeps the programs of adaptive patterns from a forward to its backward. Programs of other patterns are found by their
// requests.
std::shared_ptr<const Program> selected_program(const PlanRequest& selected, int rank,
                                                const std::function<Program()>& make) {
  static NamedCache<Program> cache("selected programs");
  return cache.get(selected.text() + ", rank " + std::to_string(rank), make,
                   [](const Program& program) { return program_bytes(program); });
}

// ---- attention_forward

Forward forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens,
                const Settings& settings, bool keep) {
  const Turn turn = take_turn(settings.group, q);
  const c10::OptionalDeviceGuard guard(at::device_of(q));
  const AttentionCall call = make_call(q, k, v, cu_seqlens, settings, keep, "forward", *turn.comm);
  AttentionStats stats;
  const AttentionOutput result = attention_forward(q, k, v, call, &stats);
  count(settings.group, &GroupCounts::forward, stats);
  const bool adaptive = is_adaptive(call.request.pattern);
  Tensor selected = at::empty({adaptive ? kDigestBytes : 0}, at::kByte);
  if (adaptive) {
    PlanRequest request = call.request;
    request.pattern = result.program->request.pattern;
    selected_program(request, call.comm->rank(), [&] { return *result.program; });
    const Digest digest = digest_of(request);
    std::memcpy(selected.mutable_data_ptr<uint8_t>(), &digest, sizeof digest);
  }
  const auto kept = [&](const Tensor& saved) { return saved.defined() ? saved : at::empty({0}, q.options()); };
  return {result.out.contiguous(), result.lse.contiguous(), kept(result.saved_k), kept(result.saved_v),
          selected.to(q.device())};
}

Forward forward_meta(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens,
                     const Settings& settings, bool keep) {
  require_tensors(q, k, v, cu_seqlens);
  // A single rank holds only its own keys and values, so nothing is kept.
  require(
      !keep || place_in(settings.group).size == 1,
      "attention_forward: over several ranks keep = True is for tensors with content, because the plan determines how "
      "much is kept; pass keep = False");
  const at::ScalarType type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1)}, q.options().dtype(type)),
          at::empty({0}, q.options()), at::empty({0}, q.options()),
          at::empty({is_adaptive(*pattern_of(settings.pattern)) ? kDigestBytes : 0}, q.options().dtype(at::kByte))};
}

// ---- attention_backward

// Repeats the forward's selection of blocks, which depends only on the bits of q and k. Collective.
std::shared_ptr<const Program> select_again(const Tensor& q, const Tensor& k, const Tensor& selected,
                                            const AttentionCall& call) {
  const PlanRequest request = select_blocks(call.request, q, k, *call.comm, call.label);
  const int rank = call.comm->rank();
  std::shared_ptr<const Program> program;
  together(*call.comm, {call.label, 0}, [&] {
    const Digest digest = digest_of(request);
    require(selected.defined() && selected.scalar_type() == at::kByte && selected.numel() == kDigestBytes &&
                std::memcmp(selected.cpu().contiguous().const_data_ptr<uint8_t>(), &digest, sizeof digest) == 0,
            "attention_backward: q and k select other blocks than the forward did: pass the q and k that it took and "
            "the `selected` that it returned, unchanged");
    program = selected_program(request, rank, [&] { return make_program(request, rank); });
  });
  return program;
}

struct Saved {
  Tensor out, lse, k, v, selected;
};

Gradients backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Saved& saved,
                   const MaybeTensor& cu_seqlens, const Settings& settings, bool keep) {
  const Turn turn = take_turn(settings.group, q);
  const c10::OptionalDeviceGuard guard(at::device_of(q));
  const AttentionCall call = make_call(q, k, v, cu_seqlens, settings, keep, "backward", *turn.comm);
  std::shared_ptr<const Program> program;
  if (is_adaptive(call.request.pattern)) program = select_again(q, k, saved.selected, call);
  AttentionStats stats;
  const AttentionGradients d =
      attention_backward(dout, q, k, v, {std::move(program), saved.out, saved.lse, saved.k, saved.v}, call, &stats);
  count(settings.group, &GroupCounts::backward, stats);
  return {d.dq.contiguous(), d.dk.contiguous(), d.dv.contiguous()};
}

Gradients backward_meta(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Saved& saved,
                        const MaybeTensor& cu_seqlens, const Settings&, bool) {
  require_tensors(q, k, v, cu_seqlens);
  for (const Tensor* t : {&dout, &saved.out, &saved.lse, &saved.k, &saved.v, &saved.selected}) {
    require(t->device() == q.device(), "attention_backward: all tensors must be on one device, but one is on " +
                                           t->device().str() + " and q on " + q.device().str());
  }
  const auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  return {like(q), like(k), like(v)};
}

// ---- The operators' signatures, and calls through the dispatcher.

template <typename... P>
struct Operators {
  using ForwardSignature = Forward(const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, P..., bool);
  using BackwardSignature = Gradients(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&,
                                      P..., bool);

  template <auto function>
  static Forward run_forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens, P... p,
                             bool keep) {
    return function(q, k, v, cu_seqlens, Settings{std::move(p)...}, keep);
  }
  template <auto function>
  static Gradients run_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                const Tensor& out, const Tensor& lse, const Tensor& saved_k, const Tensor& saved_v,
                                const Tensor& selected, const MaybeTensor& cu_seqlens, P... p, bool keep) {
    return function(dout, q, k, v, Saved{out, lse, saved_k, saved_v, selected}, cu_seqlens, Settings{std::move(p)...},
                    keep);
  }
  template <auto function>
  static Tensor run_attention(const Tensor& q, const Tensor& k, const Tensor& v, P... p,
                              const MaybeTensor& cu_seqlens) {
    return function(q, k, v, cu_seqlens, Settings{std::move(p)...});
  }

  static Forward forward(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens,
                         const Settings& s, bool keep) {
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow("annulus::attention_forward", "").typed<ForwardSignature>();
    return handle.call(q, k, v, cu_seqlens, s.pattern, s.group, s.layout, s.schedule, s.scale, s.dropout, s.seed,
                       s.step, s.layer, s.first_row, s.query_offset, keep);
  }
  static Gradients backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Saved& saved,
                            const MaybeTensor& cu_seqlens, const Settings& s, bool keep) {
    static const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow("annulus::attention_backward", "").typed<BackwardSignature>();
    return handle.call(dout, q, k, v, saved.out, saved.lse, saved.k, saved.v, saved.selected, cu_seqlens, s.pattern,
                       s.group, s.layout, s.schedule, s.scale, s.dropout, s.seed, s.step, s.layer, s.first_row,
                       s.query_offset, keep);
  }
};
using Ops = WithSettings<Operators>;

// ---- attention(q, k, v, ...) -> out, with its autograd node.

Tensor divided(const Tensor& t, int64_t divisor) { return divisor == 1 ? t : t / static_cast<double>(divisor); }

Tensor attention_plain(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens,
                       const Settings& settings) {
  const Tensor out = std::get<0>(Ops::forward(q, k, v, cu_seqlens, settings, /*keep=*/false));
  return divided(out, output_divisor(*pattern_of(settings.pattern)));
}

// Whether a tensor has content. The tensors with which torch.compile traces have none, and the sizes of results must be
// known without a plan.
bool has_content(const Tensor& t) {
  return !t.is_meta() && !t.key_set().has(c10::DispatchKey::Python) &&
         !t.key_set().has(c10::DispatchKey::Functionalize);
}

struct SavedSettings : torch::CustomClassHolder {
  SavedSettings(const Settings& s, bool k) : settings(s), keep(k) {}
  const Settings settings;
  const bool keep;
};

class AttentionNode : public torch::autograd::Function<AttentionNode> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& q, const Tensor& k, const Tensor& v,
                        const MaybeTensor& cu_seqlens, const Settings& settings) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const bool keep = has_content(q) && has_content(k) && has_content(v);
    const auto [out, lse, saved_k, saved_v, selected] = Ops::forward(q, k, v, cu_seqlens, settings, keep);
    // Parsed after the forward, in which all ranks together refuse a pattern that cannot be parsed.
    const int64_t divisor = output_divisor(*pattern_of(settings.pattern));
    context->save_for_backward({q, k, v, out, lse, saved_k, saved_v, selected, cu_seqlens.value_or(Tensor())});
    context->saved_data["divisor"] = divisor;
    context->saved_data["settings"] = c10::IValue::make_capsule(c10::make_intrusive<SavedSettings>(settings, keep));
    return divided(out, divisor);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const auto with = c10::static_intrusive_pointer_cast<SavedSettings>(context->saved_data["settings"].toCapsule());
    const Tensor dout = divided(grads[0], context->saved_data["divisor"].toInt());
    const MaybeTensor cu_seqlens = saved[8].defined() ? MaybeTensor(saved[8]) : std::nullopt;
    const auto [dq, dk, dv] =
        Ops::backward(dout, saved[0], saved[1], saved[2], {saved[3], saved[4], saved[5], saved[6], saved[7]},
                      cu_seqlens, with->settings, with->keep);
    return {dq, dk, dv, Tensor(), Tensor()};  // one for each input of forward
  }
};

Tensor attention_autograd(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& cu_seqlens,
                          const Settings& settings) {
  // PyTorch's node does not accept None and would raise on this rank only; the forward raises on all ranks.
  if (!q.defined() || !k.defined() || !v.defined()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return attention_plain(q, k, v, cu_seqlens, settings);
  }
  return AttentionNode::apply(q, k, v, cu_seqlens, settings);
}

}  // namespace

TORCH_LIBRARY(annulus, m) {
  avoid_wrong_gradients();  // as soon as the library is loaded, because PyTorch may call cuDNN before annulus does
  // `pattern` is written as in docs/attention.md: "{ kind = 'causal' }". q is [batch, n, heads, head size], k and v are
  // [batch, m, kv heads, head size]. `group` is the name of a process group; "" stands for the ranks of mpirun, or the
  // process alone. `seed`, `step`, `layer` and `first_row` (the global number of batch row 0) determine dropout. Query
  // i has the position i + `query_offset`. `cu_seqlens` has the [documents + 1] boundaries of documents that attention
  // does not cross, of the whole sequence and the same on all ranks. Forward and backward are collective.
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, str pattern, *, str group=\"\", str layout=\"contiguous\", "
      "str schedule=\"auto\", float scale=0., float dropout=0., SymInt seed=0, SymInt step=0, int layer=0, "
      "SymInt first_row=0, SymInt query_offset=0, Tensor? cu_seqlens=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  // `keep` allows the plan to keep the keys and values held last for the backward; the plan determines their sizes.
  m.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, str pattern, str group, str layout, "
      "str schedule, float scale, float dropout, SymInt seed, SymInt step, int layer, SymInt first_row, "
      "SymInt query_offset, bool keep) -> (Tensor out, Tensor lse, Tensor saved_k, Tensor saved_v, Tensor selected)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor saved_k, "
      "Tensor saved_v, Tensor selected, Tensor? cu_seqlens, str pattern, str group, str layout, str schedule, "
      "float scale, float dropout, SymInt seed, SymInt step, int layer, SymInt first_row, SymInt query_offset, "
      "bool keep) -> (Tensor dq, Tensor dk, Tensor dv)",
      {at::Tag::pt2_compliant_tag});
}

// Registered for tensors of every kind, although only dense ones are accepted: a tensor that one rank cannot take, such
// as a sparse one, is refused inside the operator, where the other ranks learn of it.
TORCH_LIBRARY_IMPL(annulus, CompositeExplicitAutograd, m) {
  m.impl("attention", Ops::run_attention<attention_plain>);
  m.impl("attention_forward", Ops::run_forward<forward>);
  m.impl("attention_backward", Ops::run_backward<backward>);
}

TORCH_LIBRARY_IMPL(annulus, Meta, m) {
  m.impl("attention", Ops::run_attention<attention_plain>);
  m.impl("attention_forward", Ops::run_forward<forward_meta>);
  m.impl("attention_backward", Ops::run_backward<backward_meta>);
}

// attention_forward and attention_backward have no gradients of their own and raise if one is needed.
TORCH_LIBRARY_IMPL(annulus, Autograd, m) {
  m.impl("attention", Ops::run_attention<attention_autograd>);
  m.impl("attention_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("attention_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace annulus::torch_ops
