// Implements operator_clock.h.
#include "benchmarks/operator_clock.h"

#include <cstring>
#include <memory>
#include <string_view>

#include "attention/kernels/kernel.h"
#include "benchmarks/measure.h"

namespace annulus {
namespace {

struct Totals {
  double products = 0, attention = 0;
};
thread_local Totals totals;

bool is_product(std::string_view name) {
  return name == "aten::mm" || name == "aten::addmm" || name == "aten::bmm" || name == "mkldnn::_linear_pointwise";
}
bool is_attention(std::string_view name) { return name == kForwardRecord || name == kBackwardRecord; }

// These operators do not call each other, so no time is counted twice.
struct Started : at::ObserverContext {
  double at = thread_cpu_seconds();
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  const std::string_view name = function.name();
  return is_product(name) || is_attention(name) ? std::make_unique<Started>() : nullptr;
}

void end(const at::RecordFunction& function, at::ObserverContext* context) {
  if (!context) return;
  const double took = thread_cpu_seconds() - static_cast<Started*>(context)->at;
  (is_product(function.name()) ? totals.products : totals.attention) += took;
}

}  // namespace

OperatorClock::OperatorClock() {
  totals = {};
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(begin, end).scopes({at::RecordScope::FUNCTION}));
}
OperatorClock::~OperatorClock() { at::removeCallback(handle_); }

double OperatorClock::products() const { return totals.products; }
double OperatorClock::attention() const { return totals.attention; }

}  // namespace annulus
