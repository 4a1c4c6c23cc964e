// Counts the calls of attention, and their messages and bytes, for each group. operators.cc counts; the operator
// `stats` (reports.cc) returns the counts.
#pragma once

#include <cstdint>
#include <string>

#include "attention/execution/planned_call.h"

namespace annulus::torch_ops {

// The counts of one direction on this rank since the process began.
struct Counts {
  int64_t calls = 0, messages_sent = 0, bytes_sent = 0;
  double exposed_seconds = 0;  // a CPU's wait for transfers; 0 on a GPU
};
struct GroupCounts {
  Counts forward, backward;
};

// Both are thread safe.
void count(const std::string& group, Counts GroupCounts::*direction, const AttentionStats& call);
GroupCounts counts_of(const std::string& group);

}  // namespace annulus::torch_ops
