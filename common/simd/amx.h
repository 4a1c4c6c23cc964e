// The tile instructions of AMX, for the few files that compute with them. Debian's GCC has intrinsics for them that do
// not say that they read memory, so the compiler may move or remove what was written there; these macros do say it.
// The numbers of tiles are literals from 0 to 7. The instructions may be executed only where instruction_set() is kAmx,
// which asks the system for the tiles, between configure_tiles() and release_tiles() in the same thread. Included by
// the CPU kernel (attention/kernels/cpu/amx_tiles.cc) and by the benchmark that measures its peak.
#pragma once

#include <cstdint>

#if defined(__x86_64__)

// Reads tile `tile`: 16 rows of 64 bytes, `step` bytes apart.
#define ANNULUS_TILE_LOAD(tile, from, step) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"(static_cast<int64_t>(step)) : "memory")

// Writes tile `tile` likewise.
#define ANNULUS_TILE_STORE(tile, to, step) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"(static_cast<int64_t>(step)) : "memory")

#define ANNULUS_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile : :)

// Adds to each number (r, c) of tile `sum`, which holds 16 x 16 fp32, the sum over i < 32 of the products of the bf16
// numbers a(r, i) and b(i / 2, 2 c + i % 2) of two tiles with 16 rows of 32 numbers.
#define ANNULUS_TILE_MULTIPLY(sum, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : :)

namespace annulus {

// Gives all tiles of this thread 16 rows of 64 bytes.
inline void configure_tiles() {
  struct alignas(64) Configuration {
    uint8_t palette = 1, first_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static constexpr Configuration kAll;
  static_assert(sizeof kAll == 64);
  asm volatile("ldtilecfg %0" : : "m"(kAll));
}

// Makes the tiles empty, so that the system need not keep them when it runs another thread.
inline void release_tiles() { asm volatile("tilerelease" : :); }

}  // namespace annulus
#endif  // defined(__x86_64__)
