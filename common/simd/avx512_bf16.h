// The intrinsics of AVX-512 BF16, which Debian's Highway does not have, for the few files that compute with them:
//
//   #include "common/simd/avx512_bf16.h"
//   #if HWY_ARCH_X86_64
//   HWY_PUSH_ATTRIBUTES(ANNULUS_AVX512_BF16)
//   ...
//   HWY_POP_ATTRIBUTES
//   #endif
//
// The functions between the two macros may be called only where instruction_set() is at least kAvx512Bf16. Included by
// the CPU kernel (attention/kernels/cpu/bf16_pairs.cc) and by the benchmark that measures its peak.
#pragma once

#include "hwy/base.h"

#if HWY_ARCH_X86_64
// GCC 12 warns about its own header (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#define ANNULUS_AVX512_BF16 "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"
#endif
