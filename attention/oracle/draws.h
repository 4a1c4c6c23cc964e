// The random generators of docs/explanation/attention.md, implemented from their publications for the oracle, so that
// the draws of bigbird and dropout do not come from the code under test. Thread safe: functions without state.
#pragma once

#include <array>
#include <cstdint>

namespace annulus::oracle_draws {

// Advances the state x of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
// 2014) by one step and returns its output.
uint64_t mix(uint64_t x);

// Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3).
// Words are in the order of the publication's code: counter[0] and key[0] are the lowest ones.
std::array<uint32_t, 4> philox4x32_10(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

}  // namespace annulus::oracle_draws
