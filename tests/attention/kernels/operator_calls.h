// For tests that ask which attention operators have computed something.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "attention/kernels/operator_list.h"

namespace annulus::testing {

using OperatorCalls = std::map<std::string, int64_t>;

// The calls of each operator of this process while run() runs, without operators that had none.
template <typename Run>
OperatorCalls calls_during(const Run& run) {
  const OperatorCalls before = OperatorHistory::of_process().calls();
  run();
  OperatorCalls calls;
  for (const auto& [name, all] : OperatorHistory::of_process().calls()) {
    const auto had = before.find(name);
    if (const int64_t more = all - (had == before.end() ? 0 : had->second); more > 0) calls[name] = more;
  }
  return calls;
}

// "cudnn 12, flash2 3", or "none".
inline std::string text_of(const OperatorCalls& calls) {
  std::string text;
  for (const auto& [name, n] : calls) text += (text.empty() ? "" : ", ") + name + " " + std::to_string(n);
  return text.empty() ? "none" : text;
}

}  // namespace annulus::testing
