// Compares what small cases take (benchmarks/counts.h) with what they took before: bytes, messages, allocations, memory
// and plans, which no processor changes.
#include "benchmarks/counts.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/text.h"

namespace annulus::counts_test {
namespace {

TEST(Counts, AreThoseThatAreKept) {
  const Counts kept = read_counts("benchmarks/results/counts.json");
  EXPECT_EQ(join(differences(kept, count_cases()), "\n"), "")
      << "if this is meant, say why in the commit, and keep the new ones: "
         "./annulus bench counts --write benchmarks/results/counts.json";
}

TEST(Counts, DifferencesAreNamedBothWays) {
  EXPECT_EQ(differences({{"same", 1}, {"more", 2}, {"gone", 3}}, {{"same", 1}, {"more", 4}, {"new", 5}}),
            (std::vector<std::string>{"more: 2 before, 4 now", "new: not counted before, 5 now",
                                      "gone: 3 before, not counted now"}));
}

}  // namespace
}  // namespace annulus::counts_test
