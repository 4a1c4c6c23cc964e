// Implements operators_seen.h.
#include "benchmarks/operators_seen.h"

#include <mutex>
#include <string_view>
#include <unordered_map>

#include "attention/tiles/kernel.h"
#include "benchmarks/measure.h"

namespace annulus {
namespace {

constexpr char kProduct[] = "product";

// LibTorch's names of the operators that attention/kernels/library_operators.cc calls, of the CPU kernel's records
// and of matrix products. These do not call each other, so no time is counted twice.
const std::unordered_map<std::string_view, const char*>& counted_operators() {
  static const std::unordered_map<std::string_view, const char*> names = {
      {"aten::_scaled_dot_product_cudnn_attention", "cudnn"},
      {"aten::_scaled_dot_product_cudnn_attention_backward", "cudnn"},
      {"aten::_flash_attention_forward", "flash2"},
      {"aten::_flash_attention_backward", "flash2"},
      {"flash_attn_3::fwd", "flash3"},
      {"flash_attn_3::bwd", "flash3"},
      {"aten::_efficient_attention_forward", "efficient"},
      {"aten::_efficient_attention_backward", "efficient"},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", "cpu_flash"},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", "cpu_flash"},
      {kForwardRecord, "cpu"},
      {kBackwardRecord, "cpu"},
      {"aten::mm", kProduct},
      {"aten::addmm", kProduct},
      {"aten::bmm", kProduct},
      {"mkldnn::_linear_pointwise", kProduct},
  };
  return names;
}

std::mutex totals_mutex;  // guards the totals
OperatorNames names_seen;
double attention_took, products_took;

template <typename T>
T guarded(const T& value) {
  const std::lock_guard lock(totals_mutex);
  return value;
}

struct Started : at::ObserverContext {
  explicit Started(const char* n) : name(n) {}
  const char* const name;
  const double at = thread_cpu_seconds();
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  const auto found = counted_operators().find(function.name());
  return found == counted_operators().end() ? nullptr : std::make_unique<Started>(found->second);
}

void end(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  const auto& started = static_cast<const Started&>(*context);
  const double took = thread_cpu_seconds() - started.at;
  const std::lock_guard lock(totals_mutex);
  if (started.name == kProduct) {
    products_took += took;
    return;
  }
  attention_took += took;
  names_seen.insert(started.name);
}

}  // namespace

OperatorsSeen::OperatorsSeen() {
  const std::lock_guard lock(totals_mutex);
  names_seen.clear();
  attention_took = products_took = 0;
  handle_ = at::addGlobalCallback(at::RecordFunctionCallback(begin, end).scopes({at::RecordScope::FUNCTION}));
}
OperatorsSeen::~OperatorsSeen() { at::removeCallback(handle_); }

OperatorNames OperatorsSeen::names() const { return guarded(names_seen); }
double OperatorsSeen::attention_seconds() const { return guarded(attention_took); }
double OperatorsSeen::product_seconds() const { return guarded(products_took); }

std::string text_of_operators(const OperatorNames& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " and ") + name;
  return text.empty() ? "no operator" : text;
}

}  // namespace annulus
