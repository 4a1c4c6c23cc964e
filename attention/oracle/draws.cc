// See draws.h.
#include "attention/oracle/draws.h"

namespace annulus::oracle_draws {

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

std::array<uint32_t, 4> philox4x32_10(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    if (round > 0) key = {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
    const uint64_t first = uint64_t{0xD2511F53} * counter[0], second = uint64_t{0xCD9E8D57} * counter[2];
    const auto high = [](uint64_t product) { return static_cast<uint32_t>(product >> 32); };
    const auto low = [](uint64_t product) { return static_cast<uint32_t>(product); };
    counter = {high(second) ^ counter[1] ^ key[0], low(second), high(first) ^ counter[3] ^ key[1], low(first)};
  }
  return counter;
}

}  // namespace annulus::oracle_draws
