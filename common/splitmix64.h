// splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): hashing a number to
// 64 bits that look random. Where draws are to be a function of some numbers alone.
#pragma once

#include <cstdint>

namespace annulus {

// From one state of the generator to the next.
inline constexpr uint64_t kSplitmix64Step = 0x9e3779b97f4a7c15;

// The output that follows the state x.
inline uint64_t splitmix64(uint64_t x) {
  x += kSplitmix64Step;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace annulus
