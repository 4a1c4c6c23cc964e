// Counts operators, for tests of what modules compute.
#pragma once

#include <ATen/record_function.h>

#include <memory>
#include <string_view>

namespace annulus::testing {

// Counts calls of operators on this thread.
class OperatorCounter {
 public:
  explicit OperatorCounter(std::string_view name) {
    wanted_ = name, count_ = 0;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(begin).scopes({at::RecordScope::FUNCTION}));
  }
  ~OperatorCounter() { at::removeCallback(handle_); }
  int count() const { return count_; }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& f) {
    if (std::string_view(f.name()) == wanted_) ++count_;
    return nullptr;
  }
  static inline thread_local std::string_view wanted_;
  static inline thread_local int count_ = 0;
  at::CallbackHandle handle_;
};

}  // namespace annulus::testing
