// Dropout's draws (dropout.h) for a row of pairs on CPUs: vectorized Philox 4x32-10, compiled for each instruction set
// (common/simd/versions.h). Used by dropout.cc and the CPU's flash attention. Thread safe: a function without state.
#pragma once

#include <cstdint>

#include "attention/pattern/span.h"

namespace annulus {

// Sets factors[j] to 0 if the pair of `query` and keys.at(j) is dropped, and to `kept` otherwise. A pair is dropped if
// word (key position mod 4) of the generator at the counter (key position / 4, query) is below `threshold`. Positions
// are at least 0. T is float or double.
template <typename T>
void draw_row(uint64_t philox_key, int64_t query, const Span& keys, uint64_t threshold, T kept, T* factors);

}  // namespace annulus
