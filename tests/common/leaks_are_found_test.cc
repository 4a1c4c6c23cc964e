// Tests that a leak is found where the address sanitizer runs. tools/sanitizers.sh names it; other builds cannot see
// leaks.
#include <gtest/gtest.h>

#include <cstdlib>

namespace annulus::leaks_are_found_test {
namespace {

TEST(Leaks, ThatArePlantedAreFound) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto leak = [] {
    volatile char* lost = new char[1000];
    lost[0] = 1;
    lost = nullptr;
    std::exit(0);
  };
  EXPECT_EXIT(leak(), ::testing::ExitedWithCode(1), "LeakSanitizer: detected memory leaks(.|\n)*1000 byte");
}

}  // namespace
}  // namespace annulus::leaks_are_found_test
