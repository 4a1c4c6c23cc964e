// Tests of comm/agreement.h: when one rank fails, all ranks fail with an error that names it.
#include "comm/agreement.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <functional>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/following_error.h"
#include "comm/threads/threads.h"
#include "common/error.h"

namespace annulus::agreement_test {
namespace {

TEST(Together, AllContinueWhenNoRankFails) {
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

TEST(Together, AllFailWhenOneRankFails) {
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
    together(world, {"test", 2}, [] {});  // the communicator can still be used
  });
}

// Returns what `together` raises on each rank when `action` runs with that rank's number.
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
    together(world, {"afterwards", 1}, [] {});  // the communicator can still be used
  });
  return said;
}

// Ranks that did not fail themselves raise an error that says so, from which the launcher learns which rank failed.
TEST(Together, MarksTheErrorOfRanksThatDidNotFail) {
  for (const bool only_first : {false, true}) {
    std::vector<int> failed(3, -1);
    run_ranks(3, [&](Communicator& world) {
      try {
        together(
            world, {"reading files", 0},
            [&] {
              if (only_first || world.rank() == 1) throw Error(ErrorKind::kInput, "text", "no file a");
            },
            only_first);
      } catch (const FollowingError& e) {
        failed[static_cast<size_t>(world.rank())] = e.failed();
      } catch (const Error&) {
      }
    });
    EXPECT_EQ(failed, only_first ? (std::vector<int>{-1, 0, 0}) : (std::vector<int>{1, -1, 1}));
  }
}

TEST(Together, NamesEveryFailingRankWithItsMessage) {
  const auto fail = [](int rank) {
    if (rank == 1) throw Error(ErrorKind::kInput, "text", "no file a");
    if (rank == 2 || rank == 4) throw Error(ErrorKind::kBusy, "run", "in use");
  };
  const std::string all = "3 [text] on rank 1: no file a; on ranks 2,4: [run] in use";
  EXPECT_EQ(messages(5, fail), std::vector<std::string>(5, all));
}

TEST(Together, MergesEqualMessagesOfAllRanks) {
  const auto fail = [](int) { throw Error(ErrorKind::kPlan, "plan", "3 heads over 2 ranks"); };
  EXPECT_EQ(messages(3, fail), std::vector<std::string>(3, "4 [plan] 3 heads over 2 ranks"));
}

TEST(Together, MergesEqualMessagesOfSeveralRanks) {
  const auto fail = [](int rank) {
    if (rank != 1) throw Error(ErrorKind::kInput, "text", "no file a");
  };
  EXPECT_EQ(messages(3, fail), std::vector<std::string>(3, "3 [text] on ranks 0,2: no file a"));
}

TEST(Together, NamesEveryRankButShowsEightMessages) {
  const auto fail = [](int rank) {
    if (rank > 0) throw Error(ErrorKind::kInput, "text", "no file " + std::to_string(rank));
  };
  for (const std::string& said : messages(14, fail)) {
    EXPECT_TRUE(said.starts_with("3 [text] on rank 1: no file 1; on rank 2: no file 2; on rank 3")) << said;
    EXPECT_TRUE(said.ends_with("; on rank 8: no file 8; with other messages also on ranks 9-13")) << said;
  }
}

TEST(Together, ConvertsAnyExceptionToAnError) {
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
  EXPECT_EQ(said[3].find('\n'), std::string::npos) << said[3];  // no stack trace
  EXPECT_EQ(said, std::vector<std::string>(4, said[3]));
}

// LibTorch raises its general error then, except where a GPU's allocator fails. None of these allocations succeeds.
TEST(Together, AnyOutOfMemoryIsAResourceError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer ends the process when memory cannot be allocated";
#endif
  const auto fail = [](int rank) {
    if (rank == 0) at::empty({int64_t{1} << 60}, at::kByte);
    if (rank == 1) at::empty({int64_t{1} << 31, int64_t{1} << 31, 4}, at::kFloat);
    if (rank == 2) std::vector<int64_t>().reserve(size_t{1} << 62);
    if (rank == 3) static_cast<void>(std::vector<int64_t>(size_t{1} << 58));
    if (rank == 4) TORCH_CHECK(false, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`");
  };
  EXPECT_EQ(messages(6, fail)[5],
            "8 [memory] on rank 0: reading files: out of memory: 1.2 EB more cannot be allocated; on rank 1: reading "
            "files: out of memory: the size of a tensor that was asked for overflows 64 bits; on ranks 2-3: reading "
            "files: out of memory; on rank 4: reading files: out of memory on the GPU");
}

TEST(Together, ErrorOfRankZeroIsRaisedByAllIfItActsAlone) {
  const auto fail = [](int rank) {
    EXPECT_EQ(rank, 0);
    throw std::bad_alloc();
  };
  EXPECT_EQ(messages(3, fail, /*only_first=*/true),
            std::vector<std::string>(3, "8 [memory] reading files: out of memory"));
}

TEST(Together, FailureOfAnyReturnsTheSameErrorOnAllRanks) {
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

// Returns what agree_together raises on each rank, or the numbers that it returns.
std::vector<std::string> agreed(int ranks, const std::function<Terms(int)>& find) {
  std::vector<std::string> said(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](Communicator& world) {
    std::string& mine = said[static_cast<size_t>(world.rank())];
    const int64_t before = world.stats().collectives;
    try {
      for (const auto& [a, b, c] : agree_together(world, {"a call", 0}, [&] { return find(world.rank()); })) {
        mine += std::to_string(a) + "," + std::to_string(b) + "," + std::to_string(c) + ";";
      }
      EXPECT_EQ(world.stats().collectives - before, ranks > 1 ? 1 : 0);
    } catch (const Error& e) {
      mine = std::to_string(e.exit_code()) + " " + e.what();
    }
    together(world, {"afterwards", 1}, [] {});  // the communicator can still be used
  });
  return said;
}

TEST(AgreeTogether, ReturnsTheNumbersOfAllRanks) {
  const auto find = [](int rank) -> Terms { return {{{"heads", "4"}}, {rank, 10 * rank, 7}}; };
  EXPECT_EQ(agreed(1, find), std::vector<std::string>{"0,0,7;"});
  EXPECT_EQ(agreed(3, find), std::vector<std::string>(3, "0,0,7;1,10,7;2,20,7;"));
}

TEST(AgreeTogether, NamesTheRankThatDiffers) {
  const auto find = [](int rank) -> Terms { return {{{"heads", rank == 1 ? "4" : "2"}}}; };
  EXPECT_EQ(agreed(3, find),
            std::vector<std::string>(3, "5 [comm] ranks disagree before a call: heads is 2 on ranks 0,2, 4 on rank 1"));
}

// The difference is shown, however far from the beginning it is, and every rank is named.
TEST(AgreeTogether, ShowsLongTermsWhereTheyDiffer) {
  const auto find = [](int rank) -> Terms {
    return {{{"plan", std::string(1000, 'x') + ", schedule " + std::to_string(rank) + ", " + std::string(900, 'y')}}};
  };
  const std::string said = agreed(7, find)[0];
  for (const char* part :
       {", schedule 0, y", "... on rank 0, ...", ", schedule 3, y", "and 3 more values on ranks 4-6"}) {
    EXPECT_NE(said.find(part), std::string::npos) << part << " is not in: " << said;
  }
  EXPECT_LT(said.size(), 1000U);
}

// The terms of the rank that raises are unknown, so no difference is reported.
TEST(AgreeTogether, NamesTheRankThatRaises) {
  const auto find = [](int rank) -> Terms {
    if (rank == 2) throw Error(ErrorKind::kPlan, "plan", "3 heads");
    return {{{"heads", "2"}}};
  };
  EXPECT_EQ(agreed(3, find), std::vector<std::string>(3, "4 [plan] on rank 2: 3 heads"));
  const auto all = [](int) -> Terms { throw std::bad_alloc(); };
  EXPECT_EQ(agreed(3, all), std::vector<std::string>(3, "8 [memory] a call: out of memory"));
}

}  // namespace
}  // namespace annulus::agreement_test
