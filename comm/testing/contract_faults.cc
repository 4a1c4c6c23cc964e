// The contract of communicators: refused arguments, ranks that disagree, and ranks that are missing. Faults are
// provoked on a separate split, so that the test's own communicator can end the test with a barrier.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>
#include <memory>
#include <stdexcept>

#include "comm/agreement.h"
#include "comm/testing/contract_fixture.h"

namespace annulus::contract {
namespace {

TEST_P(CommSuite, RefusesUnsupportedArguments) {
  ranks([&](Communicator& comm) {
    at::Tensor good = at::zeros({4, 6}, options(at::kFloat));
    const auto refused = [&](const std::vector<std::string>& parts, const std::function<void()>& body) {
      expect_error(ErrorKind::kPlan, parts, body);
    };
    const int me = comm.rank();
    refused({"layer 3", "step 2", "not contiguous", "[6, 4]"}, [&] {
      comm.exchange({{good.t(), me}}, {}, {"layer 3", 2, "step"});
    });
    refused({"receive buffer", "not contiguous"}, [&] { comm.exchange({}, {{good.t(), me}}, {"layer 3", 2, "step"}); });
    refused({"undefined"}, [&] { comm.exchange({{at::Tensor(), me}}, {}, {"layer 3", 2, "step"}); });
    refused({"peer " + std::to_string(comm.size())}, [&] { comm.exchange({{good, comm.size()}}, {}, {"x", 0}); });
    refused({"peer -1"}, [&] { comm.exchange({}, {{good, -1}}, {"x", 0}); });
    refused({"meta"}, [&] { comm.exchange({{good.to(at::kMeta), me}}, {}, {"x", 0}); });
    at::Tensor transposed = good.t();
    refused({"not contiguous"}, [&] { comm.all_reduce(transposed, ReduceOp::kSum, {"x", 0}); });
    refused({"not contiguous"}, [&] { comm.broadcast(transposed, 0, {"x", 0}); });
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kByte}) {
      at::Tensor narrow = at::zeros({3}, options(dtype));
      refused({"cannot reduce"}, [&] { comm.all_reduce(narrow, ReduceOp::kSum, {"x", 0}); });
      if (dtype == at::kBFloat16) continue;  // reduce_scatter accepts bf16
      at::Tensor all = at::zeros({comm.size(), 3}, options(dtype));
      refused({"cannot reduce"}, [&] { comm.reduce_scatter(narrow, all, {"x", 0}); });
    }
    refused({"[ranks, ...input.shape]"}, [&] { comm.all_gather(good, good, {"x", 0}); });
    at::Tensor wide = at::zeros({comm.size(), 4, 6}, options(at::kDouble));
    refused({"fp64", "fp32"}, [&] { comm.all_gather(wide, good, {"x", 0}); });
    refused({"input is"}, [&] { comm.reduce_scatter(good, good, {"x", 0}); });
    refused({"root " + std::to_string(comm.size())}, [&] { comm.broadcast(good, comm.size(), {"x", 0}); });
    comm.barrier({"nothing was sent", 0});
  });
}

TEST_P(CommPairs, DisagreementIsRaisedOnEveryRank) {
  ranks([&](Communicator& comm) {
    const int last = comm.size() - 1;
    const bool odd = comm.rank() == last;
    const std::string others = last == 1 ? "rank 0" : "ranks 0-" + std::to_string(last - 1);
    const auto disagree = [&](const std::vector<std::string>& parts, const std::function<void()>& body) {
      std::vector<std::string> all = parts;
      all.push_back("on " + others);
      all.push_back("on " + rank_text(last));
      expect_error(ErrorKind::kMismatch, all, body);
    };
    at::Tensor tensor = at::zeros({odd ? 5 : 6}, options(at::kFloat));
    disagree({"gradients", "step 9", "shape is [6]", "[5] on"}, [&] {
      comm.all_reduce(tensor, ReduceOp::kSum, {"gradients", 9, "step"});
    });
    at::Tensor typed = at::zeros({6}, options(odd ? at::kLong : at::kFloat));
    disagree({"dtype is fp32", "int64"}, [&] { comm.all_reduce(typed, ReduceOp::kSum, {"gradients", 9, "step"}); });
    at::Tensor same = at::zeros({6}, options(at::kFloat));
    disagree({"reduction is sum", "max"}, [&] {
      comm.all_reduce(same, odd ? ReduceOp::kMax : ReduceOp::kSum, {"gradients", 9, "step"});
    });
    disagree({"root is 0"}, [&] { comm.broadcast(same, odd ? 1 : 0, {"parameters", 0}); });
    disagree({"operation is \"loss\"", "\"norm\""}, [&] {
      comm.all_reduce(same, ReduceOp::kSum, {odd ? "norm" : "loss", 0});
    });
    disagree({"step is 3", "4 on"}, [&] { comm.barrier({"barrier", odd ? 4 : 3, "step"}); });
    disagree({"call is 3", "4 on"}, [&] { comm.barrier({"barrier", odd ? 4 : 3}); });
    disagree({"collective is all_reduce", "broadcast"}, [&] {
      if (odd) {
        comm.broadcast(same, 0, {"x", 0});
      } else {
        comm.all_reduce(same, ReduceOp::kSum, {"x", 0});
      }
    });
    disagree({"collective is split", "barrier"}, [&] {
      if (odd) {
        comm.barrier({"split", 0});
      } else {
        comm.split(0, 0);
      }
    });
    // Nothing was sent, so the communicator can still be used.
    comm.all_reduce(same, ReduceOp::kSum, {"after", 0});
  });
}

TEST_P(CommPairs, AgreementNamesRanksAndFields) {
  ranks([&](Communicator& comm) {
    const bool odd = comm.rank() == comm.size() - 1;
    require_agreement(comm, {{"a", "1"}, {"b", ""}}, {"attention forward", 1});
    require_agreement(comm, {}, {"attention forward", 2});
    const std::string others = comm.size() == 2 ? "rank 0" : "ranks 0-" + std::to_string(comm.size() - 2);
    expect_error(ErrorKind::kMismatch,
                 {"before attention forward, call 12: shape is [1,128] on " + others + ", [1,64] on " +
                  rank_text(comm.size() - 1)},
                 [&] {
                   require_agreement(comm, {{"dtype", "fp32"}, {"shape", odd ? "[1,64]" : "[1,128]"}},
                                     {"attention forward", 12});
                 });
    // For long values only the lines that differ are shown.
    const std::string config = "steps = 3\n[model]\nwidth = 64\nheads = 4\n";
    const std::string other = "steps = 3\n[model]\nwidth = 32\nheads = 4\ntied = true\n";
    expect_error(ErrorKind::kMismatch,
                 {"config: model.width is 64 on " + others + ", 32 on", "model.tied is absent on"}, [&] {
                   require_agreement(comm, {{"config", odd ? other : config}}, {"start", 0});
                 });
    try {
      require_agreement(comm, {{"config", odd ? other : config}}, {"start", 0});
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).find("heads"), std::string::npos) << e.what();
    }
    expect_error(ErrorKind::kMismatch, {"extra is absent on " + others}, [&] {
      std::vector<Field> fields{{"a", "1"}};
      if (odd) fields.push_back({"extra", "x:y"});
      require_agreement(comm, fields, {"start", 0});
    });
    require_agreement(comm, {{"a", "1"}}, {"start", 1});
  });
}

TEST_P(CommPairs, MismatchedMessagesAreAnError) {
  struct Case {
    int64_t sent;
    int64_t expected;
    at::ScalarType sent_dtype;
    const char* text;
  };
  const Case cases[] = {{100, 50, at::kFloat, "200"},
                        {50, 100, at::kFloat, "400"},
                        {200000, 100, at::kFloat, "400"},
                        {100, 200000, at::kFloat, "800000"},
                        {50, 100, at::kDouble, "fp64"}};
  ranks([&](Communicator& comm) {
    const int last = comm.size() - 1;
    for (const Case& c : cases) {
      auto apart = comm.split(0, comm.rank());
      meet(*apart, 0, last);
      // The sender of a long message waits in vain for it to be received.
      apart->set_timeout(Seconds(comm.rank() == last ? 0.3 : 20));
      at::Tensor in = at::empty({c.expected}, options(at::kFloat));
      at::Tensor out = at::zeros({c.sent}, options(c.sent_dtype));
      if (comm.rank() == 0) {
        expect_error(ErrorKind::kMismatch, {"layer 1", "step 4", rank_text(last), c.text}, [&] {
          finish(*apart->exchange({}, {{in, last}}, {"layer 1", 4, "step"}));
        });
        expect_error(ErrorKind::kComm, {"dead"}, [&] { apart->barrier({"later", 5}); });
      } else if (comm.rank() == last) {
        try {
          apart->exchange({{out, 0}}, {}, {"layer 1", 4, "step"})->wait();
        } catch (const Error& e) {
          EXPECT_TRUE(e.kind() == ErrorKind::kMismatch || e.kind() == ErrorKind::kComm) << e.what();
        }
      }
      comm.barrier({"next case", 0});
    }
  });
}

TEST_P(CommPairs, MissingPeerMissesTheDeadline) {
  with_faults([&](Communicator& comm, Communicator& apart, int last) {
    EXPECT_EQ(apart.timeout(), comm.timeout());
    meet(apart, 0, last);
    if (comm.rank() == 0) {
      apart.set_timeout(Seconds(0.2));
      at::Tensor in = at::empty({512}, options(at::kDouble));
      at::Tensor out = at::empty({512}, options(at::kDouble));
      std::unique_ptr<Work> work = apart.exchange({{out, last}}, {{in, last}}, {"attention backward", 7, "step"});
      expect_error(ErrorKind::kComm, {"attention backward", "step 7", rank_text(last), "4096 bytes", "0.2 s"},
                   [&] { finish(*work); });
      expect_error(ErrorKind::kComm, {"attention forward", "step 8", "dead"}, [&] {
        apart.exchange({{out, last}}, {}, {"attention forward", 8, "step"});
      });
      expect_error(ErrorKind::kComm, {"dead"}, [&] { apart.barrier({"after", 9}); });
    }
  });
}

// A busy peer does not wait itself, so only the deadline can end the wait. If the deadline does not, the peer sends
// much later, and the wait ends without the expected error.
TEST_P(CommPairs, WaitForABusyPeerMissesTheDeadline) {
  if (!backend().device.is_cpu()) GTEST_SKIP() << "wait() does not block there";
  with_faults([&](Communicator& comm, Communicator& apart, int last) {
    meet(apart, 0, last);
    at::Tensor rows = at::zeros({512}, options(at::kDouble));
    at::Tensor word = at::zeros({1}, options(at::kLong));
    if (comm.rank() == 0) {
      apart.set_timeout(Seconds(0.2));
      std::unique_ptr<Work> work = apart.exchange({}, {{rows, last}}, {"attention backward", 7, "step"});
      expect_error(ErrorKind::kComm, {"attention backward", "step 7", rank_text(last), "4096 bytes", "0.2 s"},
                   [&] { work->wait(); });
      for (int again = 0; again < 2; ++again) {  // it is not complete because it was waited for in vain
        expect_error(ErrorKind::kComm, {"attention backward"}, [&] { work->wait(); });
        expect_error(ErrorKind::kComm, {"attention backward"}, [&] { work->test(); });
      }
      comm.exchange({{word, last}}, {}, {"told", 8})->wait();
    } else if (comm.rank() == last) {
      const auto never = std::chrono::steady_clock::now() + std::chrono::seconds(15);
      std::unique_ptr<Work> told = comm.exchange({}, {{word, 0}}, {"told", 8});
      while (!told->test() && std::chrono::steady_clock::now() < never) sched_yield();
      if (!told->test()) apart.exchange({{rows, 0}}, {}, {"attention backward", 7, "step"})->wait();
      told->wait();
    }
  });
}

// A rank that never waits but calls test() repeatedly gets the error as well.
TEST_P(CommPairs, TestReportsAMissedDeadline) {
  with_faults([&](Communicator& comm, Communicator& apart, int last) {
    meet(apart, 0, last);
    if (comm.rank() == 0) {
      apart.set_timeout(Seconds(0.2));
      const auto never = std::chrono::steady_clock::now() + std::chrono::seconds(15);
      at::Tensor in = at::empty({512}, options(at::kDouble));
      std::unique_ptr<Work> work = apart.exchange({}, {{in, last}}, {"attention backward", 7, "step"});
      expect_error(ErrorKind::kComm, {"attention backward", "step 7", rank_text(last), "4096 bytes", "0.2 s"}, [&] {
        while (!work->test() && std::chrono::steady_clock::now() < never) sched_yield();
      });
      expect_error(ErrorKind::kComm, {"dead"}, [&] { apart.barrier({"after", 8}); });
    }
  });
}

TEST_P(CommPairs, CollectiveNamesTheMissingRanks) {
  with_faults([&](Communicator& comm, Communicator& apart, int last) {
    if (comm.rank() != last) {
      apart.set_timeout(Seconds(0.3));
      at::Tensor tensor = at::zeros({8}, options(at::kFloat));
      expect_error(ErrorKind::kComm, {"gradients", "step 11", rank_text(last)}, [&] {
        apart.all_reduce(tensor, ReduceOp::kSum, {"gradients", 11, "step"});
      });
      expect_error(ErrorKind::kComm, {"dead"}, [&] { apart.barrier({"after", 12}); });
    }
  });
}

// Users know the ranks of the job, not those of a split, so error texts use the numbers in the job.
TEST_P(CommPairs, RanksOfASplitAreNamedByTheirNumbersInTheJob) {
  ranks([&](Communicator& comm) {
    const int last = comm.size() - 1;
    const auto reversed = [&] {
      auto apart = comm.split(0, -comm.rank());
      meet(*apart, 0, last);
      apart->set_timeout(Seconds(0.3));
      return apart;
    };
    const std::string absent = "rank " + std::to_string(last) + " of the job";
    std::unique_ptr<Communicator> apart = reversed();
    for (int rank = 0; rank < comm.size(); ++rank) EXPECT_EQ(apart->in_job(rank), last - rank);
    if (comm.rank() == 0) {
      at::Tensor in = at::empty({8}, options(at::kFloat));
      expect_error(ErrorKind::kComm, {"bytes from " + absent}, [&] {
        finish(*apart->exchange({}, {{in, 0}}, {"ring", 1, "hop"}));
      });
    }
    comm.barrier({"next", 1});
    apart = reversed();
    if (comm.rank() != last) {
      expect_error(ErrorKind::kComm, {"gradients, step 11: ", absent + " did not come"}, [&] {
        at::Tensor tensor = at::zeros({8}, options(at::kFloat));
        apart->all_reduce(tensor, ReduceOp::kSum, {"gradients", 11, "step"});
      });
    }
    comm.barrier({"next", 2});
    apart = comm.split(0, -comm.rank());
    const bool odd = comm.rank() == last;
    expect_error(ErrorKind::kMismatch, {"[5] on " + absent}, [&] {
      at::Tensor tensor = at::zeros({odd ? 5 : 6}, options(at::kFloat));
      apart->all_reduce(tensor, ReduceOp::kSum, {"gradients", 11, "step"});
    });
    expect_error(ErrorKind::kMismatch, {"a is 2 on " + absent}, [&] {
      require_agreement(*apart, {{"a", odd ? "2" : "1"}}, {"start"});
    });
    expect_error(ErrorKind::kInput, {"on " + absent + ": no file; on "}, [&] {
      together(*apart, {"reading"}, [&] { throw Error(ErrorKind::kInput, "comm", odd ? "no file" : "no words"); });
    });
    comm.barrier({"end", 0});
  });
}

TEST_P(CommPairs, ExceptionAbandonsTheTransfer) {
  with_faults([&](Communicator& comm, Communicator& apart, int) {
    meet(apart, 0, 1);
    if (comm.rank() == 0) {
      at::Tensor in = at::empty({9}, options(at::kFloat));
      try {
        auto work = apart.exchange({}, {{in, 1}}, {"abandoned", 0});
        throw std::runtime_error("a kernel failed");  // the transfer cannot complete, so this must not wait for it
      } catch (const std::runtime_error& e) {
        EXPECT_STREQ(e.what(), "a kernel failed");
      }
      expect_error(ErrorKind::kComm, {"dead", "abandoned"}, [&] { apart.barrier({"after", 1}); });
    }
  });
}

}  // namespace
}  // namespace annulus::contract
