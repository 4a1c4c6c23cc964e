// The tile instructions of AMX, for the few files that compute with them. The intrinsics of Debian's GCC do not declare
// that they read memory, so the compiler may move or remove earlier stores; these macros declare it.
// Tile numbers are literals from 0 to 7. Execute the instructions only where instruction_set() returns kAmx (it
// requests the tiles from the kernel), between configure_tiles() and release_tiles() in the same thread. Included by
// the CPU kernel (attention/kernels/cpu/amx_tiles.cc) and by the benchmark that measures its peak.
#pragma once

#include <cstdint>

#if defined(__x86_64__)

// Loads tile `tile`: 16 rows of 64 bytes, `step` bytes apart.
#define ANNULUS_TILE_LOAD(tile, from, step) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"(static_cast<int64_t>(step)) : "memory")

// Stores tile `tile` likewise.
#define ANNULUS_TILE_STORE(tile, to, step) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"(static_cast<int64_t>(step)) : "memory")

#define ANNULUS_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile : :)

// sum(r, c) += sum over i < 32 of a(r, i) b(i / 2, 2 c + i % 2), where `sum` is a tile of 16 x 16 fp32, and `a` and `b`
// are tiles of 16 x 32 bf16.
#define ANNULUS_TILE_MULTIPLY(sum, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : :)

namespace annulus {

// Configures all tiles of this thread as 16 rows of 64 bytes.
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

// Releases the tiles, so that the kernel need not save them at a context switch.
inline void release_tiles() { asm volatile("tilerelease" : :); }

}  // namespace annulus
#endif  // defined(__x86_64__)
