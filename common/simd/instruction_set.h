// Which vector instructions this process computes with. A file with vector code is compiled once for each instruction
// set (versions.h), and this header says which of these versions the process calls. It is used through versions.h, and
// directly by code that reports the instructions: the reason for a kernel, training, the reports of hosts, benchmarks.
#pragma once

namespace annulus {

enum class InstructionSet {
  kScalar,    // the instructions that every processor of the architecture has
  kBaseline,  // SSE4 with AES, which x86-64 processors have had since 2010
  kAvx2,      // AVX2 with FMA
  kAvx512,    // AVX-512 F, BW, DQ and VL
  // The same with products of bf16, which attention on tensors of bf16 computes with. Everything else computes as with
  // kAvx512.
  kAvx512Bf16,  // AVX512_BF16
  kAmx,         // the tiles of AMX
};

// Returns the best instruction set that the processor has, limited by ANNULUS_ISA ("baseline", "avx2", "avx512",
// "avx512bf16" or "amx"). kAvx512Bf16 is not the best one of Intel's processors, which take it only if ANNULUS_ISA
// names it. The first call looks it up, and asks the system for the tiles of AMX. Raises Error(kUsage) if ANNULUS_ISA
// has another value. Thread safe.
InstructionSet instruction_set();

// Those of instruction_set() that a computation on tensors of bf16, or of another dtype, uses.
InstructionSet instructions_for(bool bf16);

// Returns "AMX", "AVX-512 BF16", "AVX-512", "AVX2", "SSE4" or "scalar".
const char* instruction_set_name(InstructionSet set);

}  // namespace annulus
