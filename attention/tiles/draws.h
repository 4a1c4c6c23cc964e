// The draws of dropout.h for a row of pairs, on CPUs: Philox 4x32-10 in vectors, compiled for each instruction set
// (simd/versions.h). Used by dropout.cc and the CPU's flash attention. No state; thread-safe.
#pragma once

#include <cstdint>

#include "attention/pattern/span.h"

namespace annulus {

// factors[j] = 0 where the pair of `query` and keys.at(j), positions of at least 0, is dropped, else `kept`: word
// (key position mod 4) of the generator at the counter (key position / 4, query) is compared with `threshold`.
// T: float or double.
template <typename T>
void draw_row(uint64_t philox_key, int64_t query, const Span& keys, uint64_t threshold, T kept, T* factors);

}  // namespace annulus
