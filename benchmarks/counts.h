// What small, fixed cases of attention and training take, in numbers that are the same in every run and on every
// processor: bytes, messages, allocations, memory, plans. benchmarks/results/counts.json keeps them, and
// tests/benchmarks/counts_test.cc, which every run of the tests includes, fails where they differ: what made a step
// send or hold more is found by the change that did it. `annulus bench counts` prints them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace annulus {

// By name: "attention, causal, ring, 4 ranks: bytes sent".
using Counts = std::map<std::string, int64_t>;

// Computes all cases, with threads as ranks. Takes a few seconds. Not thread safe: it counts what the process plans.
Counts count_cases();

// Reads and writes a file of counts, a JSON object. Raises Error(kInput or kResource), which names the file.
Counts read_counts(const std::string& path);
void write_counts(const Counts& counts, const std::string& path);

// Returns a line for each name whose counts differ or that only one of them has: "NAME: 12 before, 13 now".
std::vector<std::string> differences(const Counts& before, const Counts& now);

}  // namespace annulus
