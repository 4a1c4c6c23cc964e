// The block function of Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section
// 3.3), for dropout. Used by draws.cc on CPUs and by dropout.cu on GPUs. LibTorch's Philox is not used because its
// state is a std::array, whose operators nvcc does not compile for GPUs.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define ANNULUS_HOST_DEVICE __host__ __device__
#else
#define ANNULUS_HOST_DEVICE
#endif

namespace annulus {

inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53, kPhiloxMultiplier1 = 0xCD9E8D57;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9, kPhiloxWeyl1 = 0xBB67AE85;
inline constexpr int kPhiloxRounds = 10;

// Sets `words` to the output for the counter with `group` as the low and `query` as the high 64 bits.
ANNULUS_HOST_DEVICE inline void philox(uint64_t key, uint64_t query, uint64_t group, uint32_t (&words)[4]) {
  uint32_t a = static_cast<uint32_t>(group), b = static_cast<uint32_t>(group >> 32);
  uint32_t c = static_cast<uint32_t>(query), d = static_cast<uint32_t>(query >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t x = static_cast<uint64_t>(kPhiloxMultiplier0) * a, y = static_cast<uint64_t>(kPhiloxMultiplier1) * c;
    a = static_cast<uint32_t>(y >> 32) ^ b ^ k0;
    b = static_cast<uint32_t>(y);
    c = static_cast<uint32_t>(x >> 32) ^ d ^ k1;
    d = static_cast<uint32_t>(x);
    k0 += kPhiloxWeyl0, k1 += kPhiloxWeyl1;
  }
  words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}

}  // namespace annulus

#undef ANNULUS_HOST_DEVICE
