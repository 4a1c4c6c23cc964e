// splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) maps a number to 64
// bits that look random. Used where random draws must depend on given numbers only (dropout, initial weights, the order
// of rows), and for hashes. Thread safe: a function without state.
#pragma once

#include <cstdint>

namespace annulus {

// The difference between one state of the generator and the next.
inline constexpr uint64_t kSplitmix64Step = 0x9e3779b97f4a7c15;

// The output that follows the state x.
inline uint64_t splitmix64(uint64_t x) {
  x += kSplitmix64Step;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace annulus
