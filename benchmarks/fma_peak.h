// Measures the peaks of a core: the most multiplications and additions that it computes in a second, in fp32, in fp64
// and with products of bf16. attention.cc compares the CPU kernel with them.
#pragma once

#include <optional>

namespace annulus {

// FLOP/s of fused multiply-adds on this thread, with the instruction set that this process uses
// (common/simd/instruction_set.h): in fp64 if `wide`, otherwise in fp32. Takes about a millisecond. The result is too
// small if something else disturbs the core meanwhile. Thread safe.
double fma_flops(bool wide);

// The same for the products of pairs of bf16; nothing if this process does not compute with them.
std::optional<double> bf16_flops();

}  // namespace annulus
