// `annulus bench seeds --long`: attention over up to 4,194,304 tokens, with the patterns that make each length
// possible. Results are checked in drawn rows and keys (runtime/attend/check_rows.h), since all pairs are too many for
// fp64. Used by seeds.cc and tests.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "attention/pattern/pattern.h"
#include "attention/plan/layout.h"
#include "benchmarks/seeds/calls.h"
#include "comm/communicator.h"

namespace annulus {

struct LongOptions {
  std::vector<int64_t> lengths = {40960, 65536, 131072, 262144, 483328, 1048576, 4194304};
  double most_pairs = 4e10;  // a call that counts more is left out, and named
  int64_t check_rows = 16;   // rows and keys of each call that are checked; 0: none
};

struct LongCase {
  std::string name;
  LayoutKind layout;
  double (*pairs)(double length);  // about as many as the pattern counts
  PatternSpec (*pattern)(int64_t length);
};
const std::vector<LongCase>& long_cases();

// Collective: costs of a call over the ranks, with its check. Tests replace it.
using MeasureCall = std::function<CallFigures(const CallWanted&, Communicator&)>;

// Collective. One head of 64 in fp32, one forward and backward of each, over the ranks of `world`, each of which is a
// process. Rank 0 prints a table; tools/pictures.py draws it. Raises Error(kInternal) on all ranks after the table if
// the check of a row failed.
void run_long(const LongOptions& options, Communicator& world, std::ostream& out,
              const MeasureCall& measure = measure_call);

}  // namespace annulus
