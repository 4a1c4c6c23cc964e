// Compiles a file with vector code, but not its headers, once for each instruction set by Highway's foreach_target.h.
// Such a file looks like this:
//
//   #undef HWY_TARGET_INCLUDE
//   #define HWY_TARGET_INCLUDE "package/file.cc"
//   #include "common/simd/versions.h"
//
//   HWY_BEFORE_NAMESPACE();
//   namespace annulus::room_file::HWY_NAMESPACE {
//   ...functions...
//   constexpr Functions kFunctions = {...};  // pointers to them
//   }
//   HWY_AFTER_NAMESPACE();
//
//   #if HWY_ONCE
//   namespace annulus {
//   const room_file::Functions& functions() {
//     static const room_file::Functions& chosen = ANNULUS_VERSION(room_file, kFunctions);
//     return chosen;
//   }
//   }
//   #endif
//
// instruction_set.h chooses the version, so that ANNULUS_ISA can limit the choice. Highway's own dispatch, which would
// require linking its library, is not used.

#define HWY_DISABLED_TARGETS HWY_SSSE3

// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

#ifndef ANNULUS_SIMD_VERSIONS_H_
#define ANNULUS_SIMD_VERSIONS_H_

#include "common/simd/instruction_set.h"

// Selects the object `name` of the file's namespace `space` in this process's version. Use it under HWY_ONCE.
#if HWY_TARGETS & HWY_AVX3
#define ANNULUS_VERSION(space, name)                                                            \
  (::annulus::instruction_set() >= ::annulus::InstructionSet::kAvx512     ? space::N_AVX3::name \
   : ::annulus::instruction_set() == ::annulus::InstructionSet::kAvx2     ? space::N_AVX2::name \
   : ::annulus::instruction_set() == ::annulus::InstructionSet::kBaseline ? space::N_SSE4::name \
                                                                          : space::HWY_NAMESPACE::name)
#else
#define ANNULUS_VERSION(space, name) (space::HWY_NAMESPACE::name)
#endif

#endif  // ANNULUS_SIMD_VERSIONS_H_
