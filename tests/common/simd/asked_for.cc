// Linked into tests that run with several sets of vector instructions (each_isa in bazel/test_unit.bzl). Tests that the
// set which ANNULUS_ISA names is used, or the best one if it is unset. All tests of the program are skipped if the
// processor lacks the named set, or if that is the best one, with which the same tests run under the name without a
// set.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "common/simd/instruction_set.h"

namespace annulus {
namespace {

// Reads what the kernel reports, which is not how the code under test detects instructions.
bool processor_has(const std::string& flag) {
  std::ifstream file("/proc/cpuinfo");
  const std::istream_iterator<std::string> words(file), end;
  return std::find(words, end, flag) != end;
}

// Whether the system has given this process the registers of AMX, which instruction_set() asks for.
bool system_gives_tiles() {
  uint64_t given = 0;
#if defined(__x86_64__)
  constexpr int kGetPermission = 0x1022, kTileData = 18;  // ARCH_GET_XCOMP_PERM, XFEATURE_XTILEDATA
  instruction_set();
  if (syscall(SYS_arch_prctl, kGetPermission, &given) != 0) return false;
  given >>= kTileData;
#endif
  return given % 2 == 1;
}

struct Set {
  std::string word, flag, name;
  std::string only_of = {};  // the maker whose processors use the set without being asked to; empty: all
};
const std::vector<Set> kSets = {{"amx", "amx_bf16", "AMX"},
                                {"avx512bf16", "avx512_bf16", "AVX-512 BF16", "AuthenticAMD"},
                                {"avx512", "avx512bw", "AVX-512"},
                                {"avx2", "avx2", "AVX2"},
                                {"baseline", "sse4_2", "SSE4"}};

// Returns the set of this word, or the best one of the processor for null; null if the processor lacks it.
const Set* expected(const char* word) {
  for (const Set& set : kSets) {
    if (word == nullptr && !set.only_of.empty() && !processor_has(set.only_of)) continue;
    if (set.word == "amx" && !system_gives_tiles()) continue;
    if ((word == nullptr || set.word == word) && processor_has(set.flag)) return &set;
  }
  return nullptr;
}

class SkipsWhatCannotRun : public ::testing::Environment {
 public:
  void SetUp() override {
    const char* const word = std::getenv("ANNULUS_ISA");
    // `ANNULUS_ISA=avx2 ./annulus test` names a set for the other tests, too: they run with it.
    if (word == nullptr || std::getenv("ANNULUS_EACH_ISA") == nullptr) return;
    const Set* const set = expected(word);
    if (set != nullptr && set != expected(nullptr)) return;
    std::printf(set == nullptr ? "SKIPPED: this processor has no %s\n"
                               : "SKIPPED: %s is what this processor uses in the test of this name without it\n",
                word);
    std::exit(0);
  }
};
const ::testing::Environment* const environment = ::testing::AddGlobalTestEnvironment(new SkipsWhatCannotRun);

TEST(InstructionSet, IsTheRequestedOneOrTheBest) {
  const Set* const set = expected(std::getenv("ANNULUS_ISA"));
  EXPECT_STREQ(instruction_set_name(instruction_set()), set != nullptr ? set->name.c_str() : "scalar");
}

}  // namespace
}  // namespace annulus
