// How many multiplications and additions a core does at most, measured: what the CPU kernel is held against. Used by
// attention.cc.
#pragma once

namespace annulus {

// FLOP/s of fused multiply-adds on this thread, with the instructions that this process computes with
// (simd/instruction_set.h): in fp32, or in fp64 with `wide`. Takes about a millisecond; disturbed, it says less than
// there is.
double fma_flops(bool wide);

}  // namespace annulus
