// Finds out which vector instructions the processor has and ANNULUS_ISA allows; see instruction_set.h.
#include "common/simd/instruction_set.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "common/environment.h"
#include "common/error.h"

namespace annulus {
namespace {

#if defined(__x86_64__)
// Two extensions for which __builtin_cpu_supports has no name in clang 14 (Intel's manual, CPUID). What the system must
// save for them it saves for AVX2, or gives on request (system_gives_tiles).
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1) != 0;
}
bool has_tiles_of_bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 24 & 1) != 0 && (d >> 22 & 1) != 0;
}

// Linux gives a process the registers of AMX, 8 KiB for each thread, when it asks for them. It refuses where it is
// older than 5.16, and in some sandboxes.
bool system_gives_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// The processor must have every extension that Highway's target is compiled for (hwy/ops/set_macros-inl.h).
// Processors of Intel multiply pairs of bf16 with AVX-512 half as fast as fp32, so they do it only on request.
InstructionSet of_processor([[maybe_unused]] InstructionSet allowed) {
#if defined(__x86_64__)
  const bool baseline =
      __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
  const bool avx2 = baseline && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (allowed == InstructionSet::kAmx && bf16 && has_tiles_of_bf16() && system_gives_tiles()) {
    return InstructionSet::kAmx;
  }
  if (bf16 && (__builtin_cpu_is("amd") || allowed == InstructionSet::kAvx512Bf16)) return InstructionSet::kAvx512Bf16;
  if (avx512) return InstructionSet::kAvx512;
  if (avx2) return InstructionSet::kAvx2;
  if (baseline) return InstructionSet::kBaseline;
#endif
  return InstructionSet::kScalar;
}

InstructionSet allowed() {
  const char* const given = text_from_environment("ANNULUS_ISA");
  const std::string_view word = given != nullptr ? given : "amx";
  if (word == "amx") return InstructionSet::kAmx;
  if (word == "avx512bf16") return InstructionSet::kAvx512Bf16;
  if (word == "avx512") return InstructionSet::kAvx512;
  if (word == "avx2") return InstructionSet::kAvx2;
  if (word == "baseline") return InstructionSet::kBaseline;
  throw Error(ErrorKind::kUsage, "environment",
              "environment variable ANNULUS_ISA is \"" + std::string(word) +
                  "\": expected the most advanced vector instructions that may be used: baseline, avx2, avx512, "
                  "avx512bf16 or amx; correct it or unset it");
}

}  // namespace

InstructionSet instruction_set() {
  static const InstructionSet set = [] {
    const InstructionSet limit = allowed();
    return std::min(of_processor(limit), limit);
  }();
  return set;
}

InstructionSet instructions_for(bool bf16) {
  return bf16 ? instruction_set() : std::min(instruction_set(), InstructionSet::kAvx512);
}

const char* instruction_set_name(InstructionSet set) {
  switch (set) {
    case InstructionSet::kAmx:
      return "AMX";
    case InstructionSet::kAvx512Bf16:
      return "AVX-512 BF16";
    case InstructionSet::kAvx512:
      return "AVX-512";
    case InstructionSet::kAvx2:
      return "AVX2";
    case InstructionSet::kBaseline:
      return "SSE4";
    case InstructionSet::kScalar:
      break;
  }
  return "scalar";
}

}  // namespace annulus
