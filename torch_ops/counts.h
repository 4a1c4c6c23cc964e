// What attention has sent for each group, counted: the operator stats says it. Used by the operators.
#pragma once

#include <cstdint>
#include <string>

#include "attention/execution/attention.h"

namespace annulus::torch_ops {

// Since the process began, of one direction.
struct Counts {
  int64_t calls = 0, messages_sent = 0, bytes_sent = 0;
  double exposed_seconds = 0;  // waiting for transfers
};
struct GroupCounts {
  Counts forward, backward;
};

// Thread-safe.
void count(const std::string& group, Counts GroupCounts::*direction, const AttentionStats& call);
GroupCounts counts_of(const std::string& group);

}  // namespace annulus::torch_ops
