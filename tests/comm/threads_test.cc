// The contract of communicators over the threads backend, and tests of what only that backend guarantees.
#include "comm/threads/threads.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "comm/testing/contract.h"
#include "common/error.h"
#include "common/trace/beat.h"

namespace annulus {

namespace {

const bool registered = contract::register_backend([] {
  contract::Backend backend;
  backend.name = "threads";
  backend.sizes = {1, 2, 3, 4, 8};
  backend.run = [](int size, const std::function<void(Communicator&)>& body) {
    run_ranks(size, [&](Communicator& comm) {
      comm.set_timeout(Seconds(60));
      body(comm);
    });
  };
  backend.lends = true;
  return backend;
});

TEST(Threads, RethrowsTheFirstError) {
  for (int attempt = 0; attempt < 20; ++attempt) {
    std::atomic<int> woken = 0;
    try {
      run_ranks(4, [&](Communicator& comm) {
        if (comm.rank() == 2) throw std::out_of_range("no row 17");
        try {
          comm.barrier({"end of step", 5});
        } catch (const Error& e) {
          EXPECT_EQ(e.kind(), ErrorKind::kComm);
          EXPECT_NE(std::string(e.what()).find("rank 2 failed: no row 17"), std::string::npos) << e.what();
          ++woken;
          throw;
        }
      });
      ADD_FAILURE() << "no error";
    } catch (const std::out_of_range& e) {
      EXPECT_STREQ(e.what(), "no row 17");
    }
    EXPECT_EQ(woken, 3);
  }
}

TEST(Threads, ReportsTheMissedDeadline) {
  std::atomic<bool> over = false;
  try {
    run_ranks(3, [&](Communicator& comm) {
      if (comm.rank() == 0) {
        comm.set_timeout(Seconds(0.05));
        at::Tensor in = at::empty({4}, at::kFloat);
        auto work = comm.exchange({}, {{in, 1}}, {"ring", 3, "hop"});
        try {
          work->wait();
        } catch (...) {
          over = true;
          over.notify_all();
          throw;
        }
      } else if (comm.rank() == 1) {
        over.wait(false);
      } else {
        comm.barrier({"end", 0});
      }
    });
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "[comm] ring, hop 3: receiving 16 bytes from rank 1: not done within 0.05 s");
  }
}

TEST(Threads, WaitEndsWhenAPeerReturns) {
  try {
    run_ranks(3, [](Communicator& comm) {
      if (comm.rank() == 1) return;
      comm.barrier({"end of step", 5});
    });
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("rank 1 returned without taking part"), std::string::npos) << e.what();
  }
}

TEST(Threads, WaitInASplitEndsWhenAPeerReturns) {
  std::atomic<int> told = 0;
  run_ranks(3, [&](Communicator& comm) {
    const auto all = comm.split(0, comm.rank()), pair = comm.split(comm.rank() == 2 ? 1 : 0, comm.rank());
    if (comm.rank() == 1) return;
    at::Tensor tensor = at::full({4}, 1.0, at::kFloat);
    try {
      if (comm.rank() == 0) pair->exchange({}, {{tensor, 1}}, {"hop", 4})->wait();
      if (comm.rank() == 2) all->all_reduce(tensor, ReduceOp::kSum, {"gradients", 4});
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("returned without taking part"), std::string::npos) << e.what();
      const std::string what = e.what();  // rank 2's may also name rank 0, which returns after its error
      EXPECT_TRUE(what.find("rank 1") != std::string::npos || what.find("ranks 0-1") != std::string::npos) << what;
      ++told;
    }
  });
  EXPECT_EQ(told, 2);
}

// No rank is left that could end a wait, so the earliest deadline counts as missed at once, however late it is.
TEST(Threads, DeadlockIsDetectedAtOnce) {
  try {
    run_ranks(3, [](Communicator& comm) {
      comm.set_timeout(Seconds(comm.rank() == 1 ? 900 : 86400));
      at::Tensor in = at::empty({4}, at::kFloat);
      comm.exchange({}, {{in, (comm.rank() + 1) % 3}}, {"ring", 3, "hop"})->wait();
    });
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "[comm] ring, hop 3: receiving 16 bytes from rank 2: not done within 900 s (given up at once: every "
                 "rank waits: rank 0 in ring, hop 3: receiving 16 bytes from rank 1; rank 1 in ring, hop 3: receiving "
                 "16 bytes from rank 2; rank 2 in ring, hop 3: receiving 16 bytes from rank 0)");
  }
}

TEST(Threads, DeadlockAcrossCommunicatorsIsDetected) {
  std::atomic<int> raised = 0;
  run_ranks(4, [&](Communicator& comm) {
    const auto pair = comm.split(comm.rank() / 2, comm.rank()), crossed = comm.split(comm.rank() % 2, comm.rank());
    // 0 waits for 1, 1 for 3, 3 for 2, 2 for 0. Once the first rank has given up and continued, all others can too.
    try {
      if (comm.rank() == 0 || comm.rank() == 3) pair->barrier({"pairs", 0});
      if (comm.rank() == 1 || comm.rank() == 2) crossed->barrier({"crossed", 0});
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kComm);
      ++raised;
    }
    comm.barrier({"all go on", 0});
  });
  EXPECT_EQ(raised, 4);
}

TEST(Threads, MessageOfARankThatReturnedArrives) {
  run_ranks(2, [](Communicator& comm) {
    at::Tensor tensor = at::full({5}, comm.rank(), at::kFloat);
    if (comm.rank() == 0) comm.exchange({{tensor, 1}}, {}, {"last words", 0})->wait();
    if (comm.rank() == 1) comm.exchange({}, {{tensor, 0}}, {"last words", 0})->wait();
    EXPECT_EQ(tensor.const_data_ptr<float>()[4], 0);
  });
}

// Peers read each other's tensors and drop their references before the owner continues, so that it can free them.
TEST(Threads, PeersKeepNoReferencesToTensors) {
  std::atomic<int> held = 0;
  run_ranks(4, [&](Communicator& comm) {
    for (int attempt = 0; attempt < 2000; ++attempt) {
      at::Tensor mine = at::zeros({64}, at::kFloat);
      at::Tensor theirs = at::empty({64}, at::kFloat);
      comm.exchange({{mine, (comm.rank() + 1) % 4}}, {{theirs, (comm.rank() + 3) % 4}}, {"ring", attempt})->wait();
      if (mine.use_count() != 1 || theirs.use_count() != 1) ++held;
      at::Tensor all = at::empty({4, 64}, at::kFloat);
      comm.all_gather(all, mine, {"all-gather", attempt});
      if (mine.use_count() != 1) ++held;
      comm.reduce_scatter(theirs, all, {"reduce-scatter", attempt});
      if (all.use_count() != 1) ++held;
      comm.broadcast(theirs, attempt % 4, {"broadcast", attempt});
      comm.all_reduce(theirs, ReduceOp::kSum, {"all-reduce", attempt});
      if (theirs.use_count() != 1) ++held;
    }
  });
  EXPECT_EQ(held, 0);
}

TEST(Threads, RanksInheritTheCallersGradMode) {
  const int threads = at::get_num_threads();
  run_ranks(2, [](Communicator&) {
    EXPECT_TRUE(at::GradMode::is_enabled());
    EXPECT_EQ(at::get_num_threads(), 1);
  });
  {
    const at::NoGradGuard guard;
    run_ranks(2, [](Communicator&) { EXPECT_FALSE(at::GradMode::is_enabled()); });
  }
  EXPECT_EQ(at::get_num_threads(), threads);
}

TEST(Threads, AWaitForAnotherRankIsShownInTheBeat) {
  BeatPage page;
  run_ranks(2, [&](Communicator& comm) {
    if (comm.rank() == 0) {
      set_beat_page(&page);
      comm.barrier({"end of step", 5});
      EXPECT_EQ(page.waits, 0);
      set_beat_page(nullptr);
    } else {
      while (page.waits == 0) std::this_thread::yield();
      comm.barrier({"end of step", 5});
    }
  });
}

TEST(Threads, RefusesZeroRanks) {
  try {
    run_ranks(0, [](Communicator&) {});
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kPlan);
  }
}

// Tensors of the meta device stand for those of a GPU: a transfer without elements passes, and what only CPU tensors
// can do is refused before anything is read.
TEST(Threads, RanksThatShareADeviceExchangeItsTensorsOnly) {
  const auto body = [](Communicator& comm) {
    const int next = 1 - comm.rank();
    at::Tensor none = at::empty({0}, at::TensorOptions().device(at::kMeta));
    at::Tensor some = at::empty({4}, at::TensorOptions().device(at::kMeta));
    comm.exchange({{none, next}}, {{none, next}}, {"nothing", 0})->wait();
    const std::vector<std::function<void()>> refused = {
        [&] {
          comm.all_reduce(some, ReduceOp::kSum, {"sum", 1});
        },
        [&] {
          comm.broadcast(some, 0, {"tell", 2});
        },
        [&] {
          comm.begin_all_reduce(some, ReduceOp::kSum, {"sum", 3})->wait();
        },
        [&] { comm.split(0, comm.rank()); }};
    for (const auto& call : refused) {
      try {
        call();
        ADD_FAILURE() << "rank " << comm.rank() << " went on";
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kPlan) << e.what();
        EXPECT_NE(std::string(e.what()).find("use host()"), std::string::npos) << e.what();
      }
    }
    at::Tensor mine = at::full({1}, 1.0 + comm.rank(), at::kDouble);
    comm.host().all_reduce(mine, ReduceOp::kSum, {"on the CPU", 0});
    EXPECT_EQ(mine.item<double>(), 3);
    comm.barrier({"end", 0});
  };
  run_ranks(2, body, at::kMeta);
}

TEST(Threads, SelfCommunicatorWorksAlone) {
  const std::shared_ptr<Communicator> comm = make_self_communicator();
  EXPECT_EQ(comm->size(), 1);
  at::Tensor from = at::full({3}, 2.5, at::kDouble);
  at::Tensor to = at::empty({3}, at::kDouble);
  comm->exchange({{from, 0}}, {{to, 0}}, {"self", 0})->wait();
  EXPECT_EQ(to.const_data_ptr<double>()[2], 2.5);
  comm->all_reduce(to, ReduceOp::kSum, {"self", 1});
  EXPECT_EQ(to.const_data_ptr<double>()[2], 2.5);
  EXPECT_EQ(comm->split(0, 0)->size(), 1);
  EXPECT_EQ(all_gather_text(*comm, "me", {"self", 2}), std::vector<std::string>{"me"});
}

}  // namespace
}  // namespace annulus
