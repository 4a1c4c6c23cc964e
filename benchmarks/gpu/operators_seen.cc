// Implements operators_seen.h.
#include "benchmarks/gpu/operators_seen.h"

#include <memory>
#include <string_view>

#include "attention/kernels/kernel.h"

namespace annulus {
namespace {

// LibTorch's names of the operators that attention/operators/library_operators.cc calls, and the CPU kernel's.
constexpr struct {
  std::string_view called, name;
} kOperators[] = {
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
};

thread_local std::map<std::string, int64_t> calls_seen;

std::unique_ptr<at::ObserverContext> note_operator(const at::RecordFunction& function) {
  const std::string_view called = function.name();
  for (const auto& o : kOperators) {
    if (o.called == called) ++calls_seen[std::string(o.name)];
  }
  return nullptr;
}

}  // namespace

std::string own_operator(KernelKind chosen, at::Device device) {
  if (chosen == KernelKind::kEfficient && device.is_cpu()) return "cpu_flash";
  return std::string(to_string(chosen));
}

OperatorsSeen::OperatorsSeen() {
  calls_seen.clear();
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(note_operator).scopes({at::RecordScope::FUNCTION}));
}
OperatorsSeen::~OperatorsSeen() { at::removeCallback(handle_); }

std::map<std::string, int64_t> OperatorsSeen::calls() const { return calls_seen; }

std::string text_of_operators(const std::map<std::string, int64_t>& calls) {
  std::string text;
  for (const auto& [name, n] : calls) text += (text.empty() ? "" : " and ") + name;
  return text.empty() ? "no operator" : text;
}

}  // namespace annulus
