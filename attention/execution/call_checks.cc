// Checks a call before anything is sent; see call_checks.h.
#include "attention/execution/call_checks.h"

#include <cmath>

#include "attention/plan/layout.h"
#include "attention/tiles/tile_views.h"
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

double scale_of(const AttentionCall& call, int64_t head_dim) {
  return call.scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
}

}  // namespace annulus
