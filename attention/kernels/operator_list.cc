// See operator_list.h.
#include "attention/kernels/operator_list.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "common/error.h"
#include "common/logging/log.h"
#include "common/text.h"

namespace annulus {
namespace {

std::string text_of(const std::array<int64_t, 8>& shape, bool backward) {
  const auto& [batch, queries, heads, keys, kv_heads, head_dim, type, causal] = shape;
  return std::string(backward ? "the backward of " : "the forward of ") + std::to_string(batch) + " x " +
         counted(queries, "query") + " with " + counted(keys, "key") + ", " + (causal != 0 ? "causal" : "full") +
         ", heads " + std::to_string(heads) + ":" + std::to_string(kv_heads) + ", head size " +
         std::to_string(head_dim) + ", " + c10::toString(static_cast<at::ScalarType>(type));
}

bool is_causal(const Band& band) { return band.unbounded_below() && band.hi == 0; }

}  // namespace

OperatorHistory& OperatorHistory::of_process() {
  static auto& history = *new OperatorHistory;
  return history;
}

void OperatorHistory::set_most_prepared(int64_t shapes) {
  const std::lock_guard lock(mutex_);
  most_prepared_ = shapes;
}

std::map<std::string, int64_t> OperatorHistory::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

std::vector<std::string> OperatorHistory::refusals() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> texts;
  for (const auto& [refusal, reason] : refusals_) {
    const auto& [name, shape, backward] = refusal;
    texts.push_back(name + ", " + text_of(shape, backward) + ": " + reason);
  }
  return texts;
}

void OperatorHistory::count(const std::string& name) {
  const std::lock_guard lock(mutex_);
  ++calls_[name];
}

bool OperatorHistory::may_prepare(const std::string& name, const Shape& shape) {
  const std::lock_guard lock(mutex_);
  std::set<Shape>& shapes = prepared_[name];
  if (shapes.count(shape) > 0) return true;
  return static_cast<int64_t>(shapes.size()) < most_prepared_ && shapes.insert(shape).second;
}

bool OperatorHistory::refused(const std::string& name, const Shape& shape, bool backward) const {
  const std::lock_guard lock(mutex_);
  return refusals_.count({name, shape, backward}) > 0;
}

void OperatorHistory::refuse(const std::string& name, const Shape& shape, bool backward, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  refusals_.insert({{name, shape, backward}, reason});
}

bool OperatorHistory::passes_over_first(const std::string& name) {
  const std::lock_guard lock(mutex_);
  return passed_over_.insert(name).second;
}

OperatorHistory::Shape OperatorList::Call::shape() const {
  return {q.size(0),      q.size(1), q.size(2), k.size(1), k.size(2), q.size(3), static_cast<int64_t>(q.scalar_type()),
          is_causal(band)};
}

OperatorList::OperatorList(std::vector<std::shared_ptr<const AttentionOperator>> operators, OperatorHistory& history)
    : operators_(std::move(operators)), history_(history) {}

bool OperatorList::any_band() const {
  return std::any_of(operators_.begin(), operators_.end(), [](const auto& o) { return o->any_band(); });
}

int64_t OperatorList::backward_bytes(const OperatorSize& size, bool any) const {
  int64_t most = 0;
  for (const auto& o : operators_) {
    if (any || o == operators_[0]) most = std::max(most, o->backward_bytes(size));
  }
  return most;
}

const AttentionOperator& OperatorList::choose(const Call& call) const {
  const int64_t queries = call.q.size(1), keys = call.k.size(1);
  const bool causal = is_causal(call.band);
  const bool simple = causal || (call.band.unbounded_below() && call.band.unbounded_above());
  const AttentionOperator *last = nullptr, *full = nullptr;
  std::string refusing;
  for (const auto& o : operators_) {
    if (!o->takes({queries, keys, causal, call.backward}) || !(simple || o->any_band())) continue;
    if (!o->prepares_shapes()) {
      last = o.get();
      break;
    }
    const std::string name(o->name());
    if (history_.refused(name, call.shape(), call.backward)) {
      refusing += (refusing.empty() ? "" : ", ") + name;
      continue;
    }
    last = o.get();
    if (call.gathered) continue;
    if (history_.may_prepare(name, call.shape())) break;
    full = o.get();
  }
  if (!last && !refusing.empty()) {
    throw Error(ErrorKind::kUnavailable, "kernel",
                "no operator is left for " + text_of(call.shape(), call.backward) + ": refused by " + refusing +
                    "; use kernel = \"reference\", or another length");
  }
  if (!last) {
    throw Error(ErrorKind::kInternal, "kernel",
                "no operator takes " + counted(queries, "query") + " and " + counted(keys, "key") + " with the band " +
                    to_string(call.band));
  }
  if (full && full != last && history_.passes_over_first(std::string(full->name()))) {
    log_warn("kernel", std::string(full->name()) +
                           " has prepared as many shapes of attention calls as a process may; calls of other shapes "
                           "are computed by " +
                           std::string(last->name()) +
                           " from now on. Fewer different lengths of rows or documents avoid this");
  }
  return *last;
}

template <typename Compute>
auto OperatorList::compute(const Call& call, const Compute& run) const {
  std::string refusal;
  for (;;) {
    const AttentionOperator& o = choose(call);
    const std::string name(o.name());
    if (!refusal.empty()) log_warn("kernel", refusal + "; " + name + " computes it from now on");
    const auto refuse = [&](const c10::Error& error) {
      const std::string reason = error.what_without_backtrace();
      history_.refuse(name, call.shape(), call.backward, reason);
      refusal = name + " refuses " + text_of(call.shape(), call.backward) + ": " + reason;
    };
    try {
      auto result = run(o);
      history_.count(name);
      return result;
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const c10::AcceleratorError&) {
      throw;
    } catch (const c10::Error& error) {
      // CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, or that of the host
      const std::string_view text = error.what_without_backtrace();
      const bool memory = text.find("ALLOCATION_FAILED") != std::string_view::npos;
      if (memory || !o.prepares_shapes()) throw;
      refuse(error);
    }
  }
}

AttentionOperator::Forward OperatorList::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                 const Band& band, double scale, bool gathered) const {
  return compute({q, k, band, gathered, /*backward=*/false},
                 [&](const AttentionOperator& o) { return o.forward(q, k, v, band, scale); });
}

AttentionOperator::Backward OperatorList::backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                                   const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                                   const Band& band, double scale, bool gathered) const {
  return compute({q, k, band, gathered, /*backward=*/true},
                 [&](const AttentionOperator& o) { return o.backward(dout, q, k, v, out, lse, band, scale); });
}

}  // namespace annulus
