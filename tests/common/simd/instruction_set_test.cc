// Tests of which vector instructions a process chooses.
#include "common/simd/instruction_set.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "common/error.h"

namespace annulus::instruction_set_test {
namespace {

// Runs in a child process, because a process makes the choice once.
void choose(const char* word) {
  setenv("ANNULUS_ISA", word, 1);
  try {
    std::fprintf(stderr, "%s\n", instruction_set_name(instruction_set()));
  } catch (const Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
  }
  std::_Exit(0);
}

TEST(InstructionSetDeathTest, IsAtMostTheAllowedOne) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(choose("baseline"), ::testing::ExitedWithCode(0), "^(SSE4|scalar)\n$");
  EXPECT_EXIT(choose("avx2"), ::testing::ExitedWithCode(0), "^(AVX2|SSE4|scalar)\n$");
  EXPECT_EXIT(choose("avx512"), ::testing::ExitedWithCode(0), "^(AVX-512|AVX2|SSE4|scalar)\n$");
  EXPECT_EXIT(choose("avx512bf16"), ::testing::ExitedWithCode(0), "^(AVX-512 BF16|AVX-512|AVX2|SSE4|scalar)\n$");
  EXPECT_EXIT(choose(""), ::testing::ExitedWithCode(0), "^(AMX|AVX-512 BF16|AVX-512|AVX2|SSE4|scalar)\n$");
}

TEST(InstructionSetDeathTest, UnknownNameIsAnError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      choose("avx3"), ::testing::ExitedWithCode(0),
      "environment variable ANNULUS_ISA is \"avx3\": expected .*baseline, avx2, avx512, avx512bf16 or amx; correct it "
      "or unset it");
}

}  // namespace
}  // namespace annulus::instruction_set_test
