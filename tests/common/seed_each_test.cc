// Seeds LibTorch's generator before each test. LibTorch takes another seed in each process, and a failure could not be
// repeated. Threads that draw at the same time still share the numbers in any order. Linked into the tests that draw
// from this generator. `--gtest_random_seed=N` draws other numbers; repetitions of a test draw the same ones.
#include <ATen/Context.h>
#include <gtest/gtest.h>

namespace annulus {
namespace {

class SeedEachTest : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override {
    at::manual_seed(static_cast<uint64_t>(GTEST_FLAG_GET(random_seed)));
  }
};

[[maybe_unused]] const bool added = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new SeedEachTest);  // GoogleTest deletes it
  return true;
}();

}  // namespace
}  // namespace annulus
