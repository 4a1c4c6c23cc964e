// Which vector instructions this process computes with. Files with vector code are compiled once for each (versions.h)
// and ask here which version to call. Used through versions.h, and by who tells which instructions those are: kernels'
// reasons, training, hosts' reports, benchmarks.
#pragma once

namespace annulus {

enum class InstructionSet {
  kScalar,    // what every processor of the architecture has
  kBaseline,  // SSE4 with AES, which x86-64 processors have had since 2010
  kAvx2,      // with FMA
  kAvx512,    // F, BW, DQ and VL
};

// The best that the processor has, at most the one that ANNULUS_ISA names ("baseline", "avx2" or "avx512"). Looked up
// once. Raises Error(kUsage) where ANNULUS_ISA is another word. Thread-safe.
InstructionSet instruction_set();

// "AVX-512", "AVX2", "SSE4", "scalar".
const char* instruction_set_name(InstructionSet set);

}  // namespace annulus
