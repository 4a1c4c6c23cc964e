// torch.ops.annulus: exact attention for PyTorch users, as a shared library that torch.ops.load_library takes
// (docs/embedding.md). Over the ranks of mpirun where Python was started under one: q, k and v are then this rank's
// rows.
//
// `attention` is what users call. Its autograd node calls the operators attention_forward and attention_backward, which
// torch.compile sees as they are: opaque, with sizes but no content at compile time. An annulus::Error becomes a
// RuntimeError with the same text.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>

#include "attention/execution/attention.h"
#include "comm/agreement.h"
#include "common/error.h"
#include "memory/caches.h"
#include "modules/sequence.h"
#include "tensor_files/block_map_file.h"
#include "torch_ops/forward_state.h"
#include "torch_ops/world.h"

namespace annulus::torch_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Without the layer, though it is known here: of a backward whose saved state is damaged it is not, and the ranks hear
// of each other's errors only where they say that they do the same.
constexpr const char* kLabel = "torch.ops.annulus.attention";

void require(bool ok, const std::string& message) {
  if (!ok) throw Error(ErrorKind::kUsage, "torch", message);
}

// Users pass the same text at every call.
std::shared_ptr<const PatternSpec> pattern_of(const std::string& text) {
  static NamedCache<PatternSpec> cache("pattern texts");
  return cache.get(
      text, [&] { return parse_pattern(text, "pattern"); }, [](const PatternSpec& p) { return p.bytes(); });
}

bool reads_a_file(const PatternSpec& p) {
  return (p.kind == PatternSpec::Kind::kBlocks && p.blocks.map == BlocksSpec::Map::kFile) ||
         std::any_of(p.members.begin(), p.members.end(), reads_a_file);
}

// With the block maps of files, which are read once for each shape.
PatternSpec with_block_maps(const std::string& text, const PatternSpec& pattern, const AttentionShape& s) {
  static NamedCache<PatternSpec> cache("block maps");
  const std::string key =
      c10::str(text, "|", s.batch, "|", s.heads, "|", s.kv_heads, "|", s.q_len, "|", s.k_len, "|", s.query_offset);
  return *cache.get(
      key, [&] { return read_block_maps(pattern, s); }, [](const PatternSpec& p) { return p.bytes(); });
}

// Also of sizes that are symbols.
std::string shape_text(const Tensor& t) {
  std::ostringstream text;
  for (int64_t i = 0; i < t.dim(); ++i) text << (i == 0 ? "[" : ",") << t.sym_size(i);
  return (t.dim() == 0 ? "[" : text.str()) + "]";
}

// What holds for any three tensors that the operator takes, whether they have content or are shapes alone: of tensors
// on meta, nothing else is ever looked at, and where one of them is there, nothing is computed.
void require_tensors(const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto same = [](const c10::SymInt& a, const c10::SymInt& b) {
    return a.sym_eq(b).expect_true(__FILE__, __LINE__);
  };
  for (const auto& [name, t] : {std::pair{"q", &q}, {"k", &k}, {"v", &v}}) {
    require(t->defined(), std::string(name) + " must be a tensor, but is None");
    require(t->layout() == at::kStrided, std::string(name) + " must be a dense tensor, but is sparse");
  }
  bool fit = q.dim() == 4 && k.dim() == 4 && v.dim() == 4;
  for (int64_t i = 0; i < 4; ++i) fit = fit && same(k.sym_size(i), v.sym_size(i));
  for (const int64_t i : {0, 3}) fit = fit && same(q.sym_size(i), k.sym_size(i));
  require(fit, "q must be [batch, n, heads, head size], k and v [batch, m, kv heads, head size], but they are " +
                   shape_text(q) + ", " + shape_text(k) + " and " + shape_text(v));
  const auto heads = q.sym_size(2).maybe_as_int(), kv_heads = k.sym_size(2).maybe_as_int();
  require(
      !heads || !kv_heads || (*kv_heads > 0 && *heads % *kv_heads == 0),
      "the heads of q must be a multiple of those of k and v, but q is " + shape_text(q) + " and k " + shape_text(k));
  for (const Tensor* t : {&k, &v}) {
    require(t->scalar_type() == q.scalar_type() && t->device() == q.device(),
            std::string("q, k and v must be of one dtype on one device, but q is ") + c10::toString(q.scalar_type()) +
                " on " + q.device().str() + " and " + (t == &k ? "k " : "v ") + c10::toString(t->scalar_type()) +
                " on " + t->device().str());
  }
  const at::ScalarType type = q.scalar_type();
  require(type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf,
          std::string("q, k and v must be fp32, fp64, bf16 or fp16, but are ") + c10::toString(type));
}

AttentionCall make_call(const Tensor& q, const Tensor& k, const Tensor& v, const std::string& pattern,
                        const std::string& layout, const std::string& schedule, double scale, double dropout,
                        int64_t seed, int64_t step, int64_t layer, int64_t first_row, int64_t query_offset,
                        Communicator& comm) {
  AttentionCall call;
  call.comm = &comm;
  if (scale != 0) call.scale = scale;
  call.dropout = {
      .rate = dropout, .seed = static_cast<uint64_t>(seed), .step = step, .layer = layer, .first_row = first_row};
  call.label = kLabel;
  const OpLabel label{call.label, 0};
  const SequenceParts parts = agree_on_call(
      [&]() -> CallTerms {
        require_tensors(q, k, v);
        require(q.device().is_cpu(), "q, k and v must be on the CPU, but are on " + q.device().str());
        require(dropout >= 0 && dropout < 1,
                "dropout must be at least 0 and below 1, but is " + std::to_string(dropout));
        require(first_row >= 0,
                "first_row must be the global number of batch row 0, but is " + std::to_string(first_row));
        require(std::isfinite(scale), "scale must be finite; 0 stands for 1 / sqrt(head size)");
        call.request.layout = parse_layout(layout, "layout");
        call.request.schedule = parse_schedule(schedule, "schedule");
        return {q.size(1),
                k.size(1),
                {{"layer", std::to_string(layer)}, {"layout", layout}, {"pattern", pattern_of(pattern)->text()}}};
      },
      comm, label);
  call.request.shape = {.batch = q.size(0),
                        .heads = q.size(2),
                        .kv_heads = k.size(2),
                        .q_len = 0,
                        .k_len = 0,
                        .query_offset = query_offset};
  place_sequence(call.request, parts);
  const std::shared_ptr<const PatternSpec> given = pattern_of(pattern);
  if (!reads_a_file(*given)) {
    call.request.pattern = *given;
    return call;
  }
  agree_on_call(
      [&]() -> CallTerms {
        call.request.pattern = with_block_maps(pattern, *given, call.request.shape);
        return {};
      },
      comm, label);
  return call;
}

// ---- attention_forward(q, k, v, ...) -> (out, lse, state); out is not divided by the pattern's divisor.

std::tuple<Tensor, Tensor, Tensor> forward_plain(const Tensor& q, const Tensor& k, const Tensor& v, std::string pattern,
                                                 std::string layout, std::string schedule, double scale, double dropout,
                                                 int64_t seed, int64_t step, int64_t layer, int64_t first_row,
                                                 int64_t query_offset) {
  const Turn turn = take_turn();
  auto state = std::make_shared<ForwardState>(make_call(q, k, v, pattern, layout, schedule, scale, dropout, seed, step,
                                                        layer, first_row, query_offset, *turn.comm));
  AttentionOutput result = attention_forward(q, k, v, state->call.call());
  state->program = std::move(result.program);
  state->saved_k = std::move(result.saved_k);
  state->saved_v = std::move(result.saved_v);
  return {result.out.contiguous(), result.lse.contiguous(), hold(std::move(state))};
}

std::tuple<Tensor, Tensor, Tensor> forward_meta(const Tensor& q, const Tensor& k, const Tensor& v, std::string,
                                                std::string, std::string, double, double, c10::SymInt, c10::SymInt,
                                                int64_t, c10::SymInt, c10::SymInt) {
  require_tensors(q, k, v);
  const at::ScalarType type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1)}, q.options().dtype(type)),
          at::empty({1}, q.options().dtype(at::kByte))};
}

// ---- attention_backward(dout, q, k, v, out, lse, state) -> (dq, dk, dv)

std::tuple<Tensor, Tensor, Tensor> backward_plain(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& out, const Tensor& lse, const Tensor& held) {
  const Turn turn = take_turn();
  std::shared_ptr<const ForwardState> state;
  try {
    state = state_of(held);
  } catch (const Error& error) {
    // The other ranks, if theirs are right, are about to agree on a backward: they hear of it.
    agree_together(*turn.comm, {kLabel, 0}, [&]() -> Terms { throw; });
    throw;
  }
  const AttentionGradients d =
      attention_backward(dout, q, k, v, {state->program, out, lse, state->saved_k, state->saved_v}, state->call.call());
  return {d.dq.contiguous(), d.dk.contiguous(), d.dv.contiguous()};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                                 const Tensor& out, const Tensor& lse, const Tensor& held) {
  for (const Tensor* t : {&dout, &k, &v, &out, &lse, &held}) {
    require(t->device() == q.device(), "attention_backward: all tensors must be on one device, but one is on " +
                                           t->device().str() + " and q on " + q.device().str());
  }
  const auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  return {like(q), like(k), like(v)};
}

// ---- attention(q, k, v, ...) -> out, with its autograd node.

using ForwardSignature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, std::string,
                                                            std::string, std::string, double, double, c10::SymInt,
                                                            c10::SymInt, int64_t, c10::SymInt, c10::SymInt);
using BackwardSignature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                             const Tensor&, const Tensor&, const Tensor&);

const c10::TypedOperatorHandle<ForwardSignature>& forward_operator() {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("annulus::attention_forward", "").typed<ForwardSignature>();
  return handle;
}
const c10::TypedOperatorHandle<BackwardSignature>& backward_operator() {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("annulus::attention_backward", "").typed<BackwardSignature>();
  return handle;
}

Tensor divided(const Tensor& t, int64_t divisor) { return divisor == 1 ? t : t / static_cast<double>(divisor); }

Tensor attention_plain(const Tensor& q, const Tensor& k, const Tensor& v, std::string pattern, std::string layout,
                       std::string schedule, double scale, double dropout, c10::SymInt seed, c10::SymInt step,
                       int64_t layer, c10::SymInt first_row, c10::SymInt query_offset) {
  const Tensor out = std::get<0>(forward_operator().call(q, k, v, pattern, layout, schedule, scale, dropout, seed, step,
                                                         layer, first_row, query_offset));
  return divided(out, output_divisor(*pattern_of(pattern)));
}

class AttentionNode : public torch::autograd::Function<AttentionNode> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& q, const Tensor& k, const Tensor& v,
                        const std::string& pattern, const std::string& layout, const std::string& schedule,
                        double scale, double dropout, const c10::SymInt& seed, const c10::SymInt& step, int64_t layer,
                        const c10::SymInt& first_row, const c10::SymInt& query_offset) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [out, lse, state] = forward_operator().call(q, k, v, pattern, layout, schedule, scale, dropout, seed,
                                                           step, layer, first_row, query_offset);
    // Only now: a pattern that cannot be read is refused by all ranks together, there.
    const int64_t divisor = output_divisor(*pattern_of(pattern));
    context->save_for_backward({q, k, v, out, lse, state});
    context->saved_data["divisor"] = divisor;
    return divided(out, divisor);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const Tensor dout = divided(grads[0], context->saved_data["divisor"].toInt());
    const auto [dq, dk, dv] =
        backward_operator().call(dout, saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]);
    variable_list result = {dq, dk, dv};
    result.resize(13);  // one for each input of forward
    return result;
  }
};

Tensor attention_autograd(const Tensor& q, const Tensor& k, const Tensor& v, std::string pattern, std::string layout,
                          std::string schedule, double scale, double dropout, c10::SymInt seed, c10::SymInt step,
                          int64_t layer, c10::SymInt first_row, c10::SymInt query_offset) {
  // PyTorch's node takes no None, and would refuse it on this rank alone.
  if (!q.defined() || !k.defined() || !v.defined()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return attention_plain(q, k, v, pattern, layout, schedule, scale, dropout, seed, step, layer, first_row,
                           query_offset);
  }
  return AttentionNode::apply(q, k, v, pattern, layout, schedule, scale, dropout, seed, step, layer, first_row,
                              query_offset);
}

// ---- For programs over ranks.

// What one rank cannot take is raised on all: the others would sum it up with what this one brings next.
Tensor all_reduce_plain(const Tensor& x) {
  const Turn turn = take_turn();
  const OpLabel label{"torch.ops.annulus.all_reduce", 0};
  Tensor sum;
  agree_together(*turn.comm, label, [&]() -> Terms {
    require(x.defined(), "all_reduce takes a tensor, but x is None");
    require(x.layout() == at::kStrided && x.device().is_cpu(),
            "all_reduce takes a dense tensor on the CPU, but x is " +
                (x.layout() == at::kStrided ? "on " + x.device().str() : "sparse"));
    const at::ScalarType type = x.scalar_type();
    require(type == at::kFloat || type == at::kDouble || type == at::kLong,
            std::string("all_reduce takes fp32, fp64 and int64, so that sums are exact to the accumulator, but x is ") +
                c10::toString(type) + ": convert it first, for example with x.float()");
    sum = x.clone(at::MemoryFormat::Contiguous);
    return {};
  });
  turn.comm->all_reduce(sum, ReduceOp::kSum, label);
  return sum;
}

Tensor all_reduce_meta(const Tensor& x) { return at::empty_symint(x.sym_sizes(), x.options()); }

Tensor all_reduce(const Tensor& x) {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("annulus::all_reduce", "").typed<Tensor(const Tensor&)>();
  return handle.call(x);
}

// What is differentiated is the sum of all ranks' losses: each of them depends on the sum, so its gradient is the sum
// of theirs. Collective, as the forward is.
class AllReduceNode : public torch::autograd::Function<AllReduceNode> {
 public:
  static Tensor forward(AutogradContext*, const Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return all_reduce(x);
  }
  static variable_list backward(AutogradContext*, const variable_list& grads) { return {all_reduce(grads[0])}; }
};

Tensor all_reduce_autograd(const Tensor& x) { return x.defined() ? AllReduceNode::apply(x) : all_reduce_plain(x); }

}  // namespace

TORCH_LIBRARY(annulus, m) {
  // A pattern as in docs/attention.md: "{ kind = 'causal' }". q [batch, n, heads, head size], k and v [batch, m, kv
  // heads, head size]. `seed`, `step`, `layer` and `first_row` (the global number of batch row 0) are dropout's; query
  // i has the position i + `query_offset`. The backward is collective, as the forward is.
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, str pattern, *, str layout=\"contiguous\", str schedule=\"auto\", "
      "float scale=0., float dropout=0., SymInt seed=0, SymInt step=0, int layer=0, "
      "SymInt first_row=0, SymInt query_offset=0) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, str pattern, str layout, str schedule, float scale, "
      "float dropout, SymInt seed, SymInt step, int layer, SymInt first_row, SymInt query_offset) -> "
      "(Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor state) -> "
      "(Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  // The sum over all ranks: of gradients, losses. Its backward sums the gradients over all ranks.
  m.def("all_reduce(Tensor x) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("rank() -> int", []() { return int64_t{ranks().rank()}; });
  m.def("size() -> int", []() { return int64_t{ranks().size()}; });
  // Seconds that an operation between ranks may take.
  m.def("set_timeout(float seconds) -> ()", [](double seconds) { set_timeout(seconds); });
}

// For tensors of every kind, though they take dense ones on the CPU: what one rank alone cannot take, such as a sparse
// tensor, is refused where the others hear of it.
TORCH_LIBRARY_IMPL(annulus, CompositeExplicitAutograd, m) {
  m.impl("attention", attention_plain);
  m.impl("attention_forward", forward_plain);
  m.impl("attention_backward", backward_plain);
  m.impl("all_reduce", all_reduce_plain);
}

TORCH_LIBRARY_IMPL(annulus, Meta, m) {
  m.impl("attention", attention_plain);
  m.impl("attention_forward", forward_meta);
  m.impl("attention_backward", backward_meta);
  m.impl("all_reduce", all_reduce_meta);
}

// What has no gradient of its own says so when one is asked for.
TORCH_LIBRARY_IMPL(annulus, Autograd, m) {
  m.impl("attention", attention_autograd);
  m.impl("attention_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("attention_backward", torch::autograd::autogradNotImplementedFallback());
  m.impl("all_reduce", all_reduce_autograd);
}

}  // namespace annulus::torch_ops
