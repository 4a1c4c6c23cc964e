// Selects the vector instructions of this process. A file with vector code is compiled once for each instruction set,
// and versions.h calls the version that this header selects. Code that reports the instructions (kernel choice,
// training, host reports, benchmarks) uses it directly.
#pragma once

namespace annulus {

enum class InstructionSet {
  kScalar,    // no vector instructions beyond those of every processor of the architecture
  kBaseline,  // SSE4 with AES, which x86-64 processors have had since 2010
  kAvx2,      // AVX2 with FMA
  kAvx512,    // AVX-512 F, BW, DQ and VL
  // kAvx512 plus bf16 products, which only attention on bf16 tensors uses.
  kAvx512Bf16,  // AVX512_BF16
  kAmx,         // the tiles of AMX
};

// Returns the best instruction set that the processor has, limited by ANNULUS_ISA ("baseline", "avx2", "avx512",
// "avx512bf16" or "amx"). On Intel's processors kAvx512Bf16, which is slower than fp32 there, is used only if
// ANNULUS_ISA names it. The first call detects the processor and requests AMX tiles from the kernel. Raises
// Error(kUsage) if ANNULUS_ISA has another value. Thread safe.
InstructionSet instruction_set();

// Returns the instruction set that attention uses for bf16 tensors, or for other dtypes (at most kAvx512).
InstructionSet instructions_for(bool bf16);

// Returns "AMX", "AVX-512 BF16", "AVX-512", "AVX2", "SSE4" or "scalar".
const char* instruction_set_name(InstructionSet set);

}  // namespace annulus
