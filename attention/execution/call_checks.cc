// Checks a call before anything is sent; see call_checks.h.
#include "attention/execution/call_checks.h"

#include <algorithm>
#include <cmath>

#include "attention/plan/layout.h"
#include "attention/tiles/tile_views.h"
#include "common/checksum.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

[[noreturn]] void refuse(const AttentionCall& call, const std::string& message) {
  throw Error(ErrorKind::kPlan, "attention", call.label + ": " + message);
}

// The tensors must be this rank's rows of the request's problem.
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

// dout must be like q, and `forward` must be what the forward of the same request returned on this rank.
void require_fit(const at::Tensor& dout, const AttentionOutput& forward, const at::Tensor& q,
                 const AttentionCall& call) {
  if (!forward.program) refuse(call, "expected the output of attention_forward, got an output without a program");
  const Program& program = *forward.program;
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

TensorTraits traits_of(const at::Tensor& q) { return {q.scalar_type(), q.size(q.dim() - 1), q.device().type()}; }

std::string text_of(const Dropout& d) {
  if (d.rate == 0) return "none";
  return exact(d.rate) + ", seed " + std::to_string(d.seed) + ", step " + std::to_string(d.step) + ", layer " +
         std::to_string(d.layer) + ", first row " + std::to_string(d.first_row);
}

// The one comparison before anything is sent; see call_checks.h. `direction` is what a forward or a backward alone has
// to compare, its name first. look() returns whether this rank asks for the proof.
template <typename Look>
bool agree(const at::Tensor& q, const AttentionCall& call, std::vector<Field> direction, const PlanRequest& request,
           Look look) {
  if (!call.comm) refuse(call, "expected a communicator, got none");
  const auto find = [&] {
    require_communicator(call);
    return look();
  };
  if (call.comm->size() == 1) return find();
  if (call.agreed) {
    find();
    if (call.agreed->has(terms_of(call, call.request.text(), traits_of(q)))) return false;
    refuse(call,
           "the ranks have agreed ahead on other calls, or on tensors of another dtype, head size or device, "
           "than this one; agree on it as it is made (agreed_calls.h), or not at all");
  }
  const auto asked = agree_together(*call.comm, {call.label, 0}, [&]() -> Terms {
    const bool asks = find();
    std::vector<Field> terms = direction;
    for (Field& field : terms_of(call, request.text(), traits_of(q))) terms.push_back(std::move(field));
    return {std::move(terms), {asks}};
  });
  return std::any_of(asked.begin(), asked.end(), [](const Terms::Numbers& asks) { return asks[0] != 0; });
}

}  // namespace

// The messages here contain no rank numbers, so that ranks with the same message are named together.
void require_communicator(const AttentionCall& call) {
  if (call.comm->size() == call.request.ranks) return;
  refuse(call, "expected a communicator of the plan's " + counted(call.request.ranks, "rank") +
                   ", got a communicator of " + counted(call.comm->size(), "rank"));
}

std::vector<Field> terms_of(const AttentionCall& call, const std::string& plan, const TensorTraits& tensors) {
  const double scale = call.scale.value_or(1 / std::sqrt(static_cast<double>(tensors.head_dim)));
  return {{"call", call.label},
          {"plan", plan},
          {"proof of the plan", call.prove ? "asked for" : "not asked for"},
          {"dtype", toString(tensors.dtype)},
          {"head size", std::to_string(tensors.head_dim)},
          {"scale", exact(scale)},
          {"dropout", text_of(call.dropout)},
          {"device", c10::DeviceTypeName(tensors.device)},
          {"kernel", std::string(to_string(call.kernel))}};
}

namespace {

std::string key_of(const std::vector<Field>& terms) {
  std::string text;
  for (const Field& field : terms) text += field.value + '\0';
  const Digest hash = digest(text.data(), text.size());
  return std::to_string(hash.high) + " " + std::to_string(hash.low);
}

}  // namespace

void AgreedCalls::add(const std::vector<Field>& terms) { calls_.insert(key_of(terms)); }

bool AgreedCalls::has(const std::vector<Field>& terms) const { return calls_.count(key_of(terms)) > 0; }

double scale_of(const at::Tensor& q, const AttentionCall& call) {
  return call.scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))));
}

bool agree_on_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call,
                      const std::function<bool()>& find) {
  return agree(q, call, {{"direction", "forward"}}, call.request, [&] {
    const bool asks = find();
    require_fit(q, k, v, call);
    return asks;
  });
}

void agree_on_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       AttentionOutput& forward, const AttentionCall& call) {
  const PlanRequest& request = forward.program ? forward.program->request : call.request;
  agree(q, call, {{"direction", "backward"}, backward_term(forward.number)}, request, [&] {
    require_fit(q, k, v, call);
    if (!forward.program && !is_adaptive(call.request.pattern)) {
      forward.program = cached_program(call.request, call.comm->rank());
    }
    require_fit(dout, forward, q, call);
    return false;
  });
}

}  // namespace annulus
