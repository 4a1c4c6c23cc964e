// Long sequences over 4 ranks, forward and backward, whose drawn rows and keys are checked: for long_test.cc, and for
// the longer ones of long_sweep_test.cc.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "common/text.h"
#include "runtime/attend/attend.h"

namespace annulus::testing {

// Names and patterns of every kind whose pairs grow with the length, `length` tokens long. Masks and maps from files
// would take memory that grows with its square.
inline std::vector<std::pair<std::string, std::string>> long_patterns(int64_t length) {
  const auto n = [](int64_t x) { return std::to_string(x); };
  std::string documents;
  for (int64_t i = 0; i < length / 512; ++i) documents += (i > 0 ? ", " : "") + n(i % 2 == 0 ? 200 : 824);
  // Trees of a prompt with three answers.
  std::string lengths, parents;
  for (int64_t i = 0; i < length / 512; ++i) {
    lengths += (i > 0 ? ", 512" : "512");
    parents += (i > 0 ? ", " : "") + n(i % 4 == 0 ? -1 : i - i % 4);
  }
  // Slices: the even queries see the 64 keys before them, and all see every 4096th key.
  const std::string slices = "[{ queries = [0, 2, " + n(length / 2) + "], keys = [0, 1, " + n(length) +
                             "], lo = -64, hi = 0 }, { queries = [0, 1, " + n(length) + "], keys = [7, 4096, " +
                             n(length / 4096) + "] }]";
  return {
      {"window", "{ kind = 'window', left = 100, right = 20 }"},
      {"dilated", "{ kind = 'dilated', segment_lengths = [256, 2048], dilation_rates = [1, 8], causal = true }"},
      {"mean", "{ kind = 'dilated', segment_lengths = [128, 1024], dilation_rates = [1, 8], combine = 'mean' }"},
      {"documents", "{ kind = 'causal', documents = [" + documents + "] }"},
      {"padding", "{ kind = 'window', left = 100, right = 0, kept_keys = [[0, 1000], [" + n(length / 2) + ", " +
                      n(length - 3000) + "]] }"},
      {"sinks", "{ kind = 'window', left = 100, right = 0, sink_tokens = 4 }"},
      {"tree", "{ kind = 'tree', lengths = [" + lengths + "], parents = [" + parents + "] }"},
      {"slices", "{ kind = 'slices', slices = " + slices + " }"},
      {"union",
       "{ kind = 'union', of = [{ kind = 'window', left = 64, right = 0 }, { kind = 'blocks', map = 'dilated', "
       "window_blocks = 4, rate = 4 }], causal = true }"},
      {"local", "{ kind = 'blocks', map = 'local', window_blocks = 1 }"},
      {"dilated-blocks", "{ kind = 'blocks', map = 'dilated', window_blocks = 8, rate = 4, causal = true }"},
      {"global-local", "{ kind = 'blocks', map = 'global-local', global_blocks = 1, window_blocks = 1 }"},
      {"bigbird",
       "{ kind = 'blocks', map = 'bigbird', window_blocks = 1, global_blocks = 1, random_blocks = 2, "
       "causal = true }"},
      {"strided",
       "{ kind = 'blocks', map = 'strided', window_blocks = 0, stride = " + n(length / 1024) + ", causal = true }"},
      {"hierarchical", "{ kind = 'blocks', map = 'hierarchical', levels = [[1, 1], [8, 32]], causal = true }"},
      {"adaptive", "{ kind = 'blocks', map = 'adaptive', keep = 4 }"},
  };
}

// Runs the job over 4 ranks and expects that 64 drawn rows and keys are right.
inline void expect_long_checked(const std::string& pattern, int64_t length, int64_t heads = 1) {
  AttendOptions o;
  o.random = "queries=" + std::to_string(length) + ",heads=" + std::to_string(heads) + ",dim=16";
  o.pattern = pattern;
  o.backward = o.check = true;
  o.check_rows = "rows=64";
  ::testing::internal::CaptureStdout();
  try {
    run_ranks(4, [&](Communicator& world) { AttendJob(o, {world.hosts()}).run(world); });
  } catch (const Error& e) {
    ADD_FAILURE() << e.what();
  }
  const std::string said = ::testing::internal::GetCapturedStdout();
  const std::string all = with_commas(length * heads);
  EXPECT_NE(said.find("checked: 64 of " + all + " rows (out, lse, dq) and 64 of " + all + " keys (dk, dv), drawn"),
            std::string::npos)
      << said;
  EXPECT_NE(said.find("a fault in 5 % of them is missed with a probability of at most 3.8 %"), std::string::npos)
      << said;
}

}  // namespace annulus::testing
