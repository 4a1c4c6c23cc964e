// One rank fails: all fail, and say which.
#include "comm/agreement.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <functional>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

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

// What `together` raises on each rank when `action` runs with that rank's number.
std::vector<std::string> messages(int ranks, const std::function<void(int)>& action, bool only_first = false) {
  std::vector<std::string> said(static_cast<size_t>(ranks), "nothing");
  run_ranks(ranks, [&](Communicator& world) {
    std::string& mine = said[static_cast<size_t>(world.rank())];
    try {
      together(
          world, {"reading files", 0}, [&] { action(world.rank()); }, only_first);
    } catch (const Error& e) {
      mine = std::to_string(e.exit_code()) + " " + e.what();
    }
    together(world, {"afterwards", 1}, [] {});  // the communicator lives on
  });
  return said;
}

TEST(Together, NamesEveryFailingRankWithWhatItSaid) {
  const auto fail = [](int rank) {
    if (rank == 1) throw Error(ErrorKind::kInput, "text", "no file a");
    if (rank == 2 || rank == 4) throw Error(ErrorKind::kBusy, "run", "in use");
  };
  const std::string all = "3 [text] on rank 1: no file a; on ranks 2,4: [run] in use";
  EXPECT_EQ(messages(5, fail), std::vector<std::string>(5, all));
}

TEST(Together, SaysOnceWhatAllRanksSay) {
  const auto fail = [](int) { throw Error(ErrorKind::kPlan, "plan", "3 heads over 2 ranks"); };
  EXPECT_EQ(messages(3, fail), std::vector<std::string>(3, "4 [plan] 3 heads over 2 ranks"));
}

TEST(Together, SaysOnceWhatSeveralRanksSay) {
  const auto fail = [](int rank) {
    if (rank != 1) throw Error(ErrorKind::kInput, "text", "no file a");
  };
  EXPECT_EQ(messages(3, fail), std::vector<std::string>(3, "3 [text] on ranks 0,2: no file a"));
}

TEST(Together, NamesEveryRankWhereTooManySayDifferentThings) {
  const auto fail = [](int rank) {
    if (rank > 0) throw Error(ErrorKind::kInput, "text", "no file " + std::to_string(rank));
  };
  for (const std::string& said : messages(14, fail)) {
    EXPECT_TRUE(said.starts_with("3 [text] on rank 1: no file 1; on rank 2: no file 2; on rank 3")) << said;
    EXPECT_TRUE(said.ends_with("; on rank 8: no file 8; with other words also on ranks 9-13")) << said;
  }
}

TEST(Together, AnyExceptionIsAnError) {
  const auto fail = [](int rank) {
    if (rank == 0) throw std::bad_alloc();
    if (rank == 1) throw std::out_of_range("at(7)");
    if (rank == 2) at::empty({2}).add_(at::empty({3}));
  };
  const std::vector<std::string> said = messages(4, fail);
  const std::string begin =
      "8 [memory] on rank 0: reading files: out of memory; on rank 1: [internal] reading files: at(7); on rank 2: "
      "[torch] reading files: The size of tensor";
  EXPECT_TRUE(said[3].starts_with(begin)) << said[3];
  EXPECT_EQ(said[3].find('\n'), std::string::npos) << said[3];  // no stack
  EXPECT_EQ(said, std::vector<std::string>(4, said[3]));
}

TEST(Together, RankZeroSpeaksForAllWhereItActsForAll) {
  const auto fail = [](int rank) {
    EXPECT_EQ(rank, 0);
    throw std::bad_alloc();
  };
  EXPECT_EQ(messages(3, fail, /*only_first=*/true),
            std::vector<std::string>(3, "8 [memory] reading files: out of memory"));
}

TEST(Together, TheErrorIsTheSameOnAllRanksWhereItIsReturned) {
  run_ranks(3, [](Communicator& world) {
    EXPECT_FALSE(failure_of_any(world, {"test", 0}, [] {}));
    const std::optional<Error> error = failure_of_any(world, {"test", 1}, [&] {
      if (world.rank() == 2) throw Error(ErrorKind::kInput, "text", "no file");
    });
    ASSERT_TRUE(error);
    EXPECT_STREQ(error->what(), "[text] on rank 2: no file");
    EXPECT_EQ(error->kind(), ErrorKind::kInput);
  });
}

}  // namespace
}  // namespace annulus
