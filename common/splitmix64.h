// splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) maps a number to 64
// pseudorandom bits. Used for random draws that must be functions of given numbers (dropout, initial weights, the order
// of rows), and for hashes. Thread safe: a function without state.
#pragma once

#include <cstdint>

namespace annulus {

// The increment of the generator's state.
inline constexpr uint64_t kSplitmix64Step = 0x9e3779b97f4a7c15;

// Returns the generator's next output after the state x.
inline uint64_t splitmix64(uint64_t x) {
  x += kSplitmix64Step;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace annulus
