// One rank fails: all fail, and say which.
#include "runtime/agreement.h"

#include <gtest/gtest.h>

#include "comm/threads/threads.h"
#include "common/error.h"

namespace annulus {
namespace {

TEST(Together, AllGoOnWhenNobodyFails) {
  run_ranks(3, [](Communicator& world) {
    int calls = 0;
    together(world, {"test", 0}, [&] { ++calls; });
    EXPECT_EQ(calls, 1);
    together(
        world, {"test", 1}, [&] { ++calls; }, /*only_first=*/true);
    EXPECT_EQ(calls, world.rank() == 0 ? 2 : 1);
    EXPECT_EQ(from_first(world, {"test", 2}, [&] { return "from " + std::to_string(world.rank()); }), "from 0");
  });
}

TEST(Together, AllFailWhenOneDoes) {
  run_ranks(3, [](Communicator& world) {
    try {
      together(world, {"test", 0}, [&] {
        if (world.rank() == 1) throw Error(ErrorKind::kInput, "text", "no file x] y");
      });
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInput);
      EXPECT_STREQ(e.what(), world.rank() == 1 ? "[text] no file x] y" : "[text] on rank 1: no file x] y");
    }
    try {
      from_first(world, {"test", 1}, []() -> std::string { throw Error(ErrorKind::kBusy, "run", "in use"); });
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kBusy);
      EXPECT_STREQ(e.what(), "[run] in use");
    }
    together(world, {"test", 2}, [] {});  // the communicator lives on
  });
}

}  // namespace
}  // namespace annulus
