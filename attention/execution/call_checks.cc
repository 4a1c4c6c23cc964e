// Checks a call before anything is sent; see call_checks.h.
#include "attention/execution/call_checks.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "attention/plan/layout.h"
#include "attention/tiles/tile_views.h"
#include "common/checksum.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {

void refuse(const AttentionCall& call, const std::string& message) {
  throw Error(ErrorKind::kPlan, "attention", call.label + ": " + message);
}

void require_fit(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call) {
  const PlanRequest& request = call.request;
  if (!(call.dropout.rate >= 0 && call.dropout.rate < 1)) {
    refuse(call, "expected a dropout rate of at least 0 and below 1, got " + exact(call.dropout.rate));
  }
  if (call.softcap != 0 && !(call.softcap >= 1e-30 && call.softcap <= 1e30)) {
    refuse(call, "expected a soft cap of scores that is positive and finite, from 1e-30 to 1e30, or 0 for none, got " +
                     exact(call.softcap));
  }
  const auto expect = [&](const at::Tensor& tensor, const char* name, int64_t rows, int64_t heads) {
    const AttentionShape& shape = request.shape;
    if (tensor.dim() != 4 || tensor.size(0) != shape.batch || tensor.size(1) != rows || tensor.size(2) != heads ||
        tensor.size(3) != q.size(q.dim() - 1) || tensor.size(3) < 1) {
      refuse(call, std::string("expected ") + name + " [" + std::to_string(shape.batch) + "," + std::to_string(rows) +
                       "," + std::to_string(heads) + ",D], got " + list_text(tensor.sizes()));
    }
    if (tensor.scalar_type() != q.scalar_type() || tensor.device() != q.device()) {
      refuse(call, std::string("expected q, k, v of one dtype on one device, got ") + toString(q.scalar_type()) +
                       " on " + q.device().str() + " and " + name + " " + toString(tensor.scalar_type()) + " on " +
                       tensor.device().str());
    }
  };
  if (!q.defined() || !k.defined() || !v.defined()) refuse(call, "expected q, k and v, got an undefined tensor");
  const at::ScalarType type = q.scalar_type();
  if (type != at::kFloat && type != at::kDouble && type != at::kBFloat16 && type != at::kHalf) {
    refuse(call, std::string("expected fp32, fp64, bf16 or fp16 tensors, got ") + toString(type));
  }
  const int64_t queries = query_layout(request).count(call.comm->rank());
  const int64_t keys = key_layout(request).count(call.comm->rank());
  expect(q, "q", queries, request.shape.heads);
  expect(k, "k", keys, request.shape.kv_heads);
  expect(v, "v", keys, request.shape.kv_heads);
}

void require_sinks(const at::Tensor& sinks, const at::Tensor& q, const AttentionCall& call) {
  if (!sinks.defined()) {
    if (call.sinks) refuse(call, "the call was planned with sinks (AttentionCall::sinks), but no tensor was passed");
    return;
  }
  if (!call.sinks) refuse(call, "sinks were passed to a call that was planned without; set AttentionCall::sinks");
  const at::Tensor& s = sinks;
  if (s.dim() != 1 || s.size(0) != q.size(2) || !s.is_floating_point() || s.device() != q.device()) {
    refuse(call, "expected sinks [" + std::to_string(q.size(2)) + "] of a floating dtype on " + q.device().str() +
                     ", one for each head of q, got " + list_text(s.sizes()) + " " + toString(s.scalar_type()) +
                     " on " + s.device().str());
  }
}

void require_fit(const at::Tensor& dout, const AttentionOutput& forward, const at::Tensor& q) {
  const AttentionCall& call = forward.call.settings();
  if (!forward.call.plan()) refuse(call, "expected the output of attention_forward, got an output without a plan");
  const Program& program = forward.program();
  const PlanRequest& request = call.request;
  if (program.rank != call.comm->rank() || program.request.ranks != request.ranks ||
      !(program.request.shape == request.shape) || program.query_count() != q.size(1)) {
    refuse(call, "expected the output of this rank's forward of the same request, got that of another rank or request");
  }
  const auto expect = [&](const at::Tensor& tensor, const char* name, at::IntArrayRef sizes, at::ScalarType type) {
    if (!tensor.defined()) refuse(call, std::string("expected ") + name + ", got an undefined tensor");
    if (tensor.sizes() != sizes || tensor.scalar_type() != type || tensor.device() != q.device()) {
      refuse(call, std::string("expected ") + name + " with sizes, dtype and device as in the forward, got " +
                       list_text(tensor.sizes()) + " " + toString(tensor.scalar_type()) + " on " +
                       tensor.device().str());
    }
  };
  expect(dout, "dout", q.sizes(), q.scalar_type());
  expect(forward.out, "out", q.sizes(), q.scalar_type());
  expect(forward.lse, "lse", {q.size(0), q.size(2), q.size(1)}, accumulator_type(q.scalar_type()));
  require_sinks(forward.sinks, q, call);
  if (program.saved < 0) return;
  const int64_t rows = program.buffers[static_cast<size_t>(program.saved)].rows.rows();
  for (const at::Tensor* saved : {&forward.saved_k, &forward.saved_v}) {
    expect(*saved, "the forward's saved keys and values", {rows, q.size(3)}, q.scalar_type());
  }
}

// The messages here contain no rank numbers, so that ranks with the same message are named together.
void require_communicator(const AttentionCall& call) {
  if (call.comm->size() == call.request.ranks) return;
  refuse(call, "expected a communicator of the plan's " + counted(call.request.ranks, "rank") +
                   ", got a communicator of " + counted(call.comm->size(), "rank"));
}

bool any_asks(Communicator& comm, OpLabel label, const std::function<Agreed()>& find,
              const std::function<std::vector<Field>()>& fields) {
  const std::vector<Terms::Numbers> all = agree_together(comm, label, [&]() -> Terms {
    const auto [digest, asks] = find();
    return {{}, {asks, static_cast<int64_t>(digest.high), static_cast<int64_t>(digest.low)}};
  });
  const auto differs = [&](const Terms::Numbers& of) { return of[1] != all[0][1] || of[2] != all[0][2]; };
  if (std::any_of(all.begin(), all.end(), differs)) {
    require_agreement(comm, fields(), label);
    throw Error(
        ErrorKind::kInternal, "attention",
        std::string(label.operation) + ": the digests of the ranks differ, but not the texts; please report it");
  }
  return std::any_of(all.begin(), all.end(), [](const Terms::Numbers& of) { return of[0] != 0; });
}

bool agree_on(const PlannedCall& call, const at::Tensor& q, std::optional<int64_t> backward_of,
              const std::function<bool()>& find) {
  const AttentionCall& settings = call.settings();
  if (!settings.comm) refuse(settings, "expected a communicator, got none");
  const auto found = [&] {
    require_communicator(settings);
    call.find_plan();
    return find();
  };
  if (settings.comm->size() == 1) return found();
  if (call.agreed()) {
    found();
    if (*call.agreed() == traits_of(q)) return false;
    refuse(settings,
           "the ranks have agreed ahead on tensors of another dtype, head size or device than these; plan the call "
           "for the tensors that it will get (plan_calls), or not at all");
  }
  return any_asks(
      *settings.comm, {settings.label, 0},
      [&]() -> Agreed {
        const bool asks = found();
        const Digest digest = call.digest(traits_of(q));
        const std::array<uint64_t, 4> words = {digest.high, digest.low, backward_of ? uint64_t{1} : 0,
                                               static_cast<uint64_t>(backward_of.value_or(0))};
        return {annulus::digest(words.data(), sizeof words), asks};
      },
      [&] {
        std::vector<Field> fields = call.fields(traits_of(q));
        if (backward_of) fields.insert(fields.begin(), backward_term(*backward_of));
        fields.insert(fields.begin(), {"direction", backward_of ? "backward" : "forward"});
        return fields;
      });
}

double scale_of(const AttentionCall& call, int64_t head_dim) {
  return call.scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
}

}  // namespace annulus
