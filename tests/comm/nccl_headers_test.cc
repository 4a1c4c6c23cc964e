// Tests the headers that travel beside transfers between GPUs, with threads as ranks. They need neither a device nor
// NCCL.
#include "comm/nccl/message_headers.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <string>
#include <vector>

#include "comm/headers.h"
#include "comm/threads/threads.h"
#include "common/error.h"

namespace annulus::nccl_internal::nccl_headers_test {
namespace {

using comm_internal::Collective;
using comm_internal::make_header;

constexpr HeaderResult::State kPending = HeaderResult::kPending, kAgree = HeaderResult::kAgree,
                              kDiffer = HeaderResult::kDiffer;

// ---- Headers of messages.

at::Tensor floats(int64_t n) { return at::zeros({n}, at::kFloat); }

HeaderResult result_of(MessageHeaders::Comparison& comparison) {
  HeaderResult result = comparison.result();
  while (result.state == kPending) {
    sched_yield();
    result = comparison.result();
  }
  return result;
}

// Returns what rank 1 finds if rank 0 sends `sent` and rank 1 expects `expected`, in these orders.
HeaderResult found(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& expected) {
  HeaderResult out;
  run_ranks(2, [&](Communicator& comm) {
    MessageHeaders headers(comm.split(0, comm.rank()));
    std::vector<Message> messages;
    for (const at::Tensor& tensor : comm.rank() == 0 ? sent : expected) messages.push_back({tensor, 1 - comm.rank()});
    const auto comparison =
        comm.rank() == 0 ? headers.start(messages, {}, Seconds(20)) : headers.start({}, messages, Seconds(20));
    const HeaderResult result = result_of(*comparison);
    if (comm.rank() == 1) out = result;
    comm.barrier({"end", 0});
  });
  return out;
}

TEST(MessageHeaders, AgreeWhereSizesAndDtypesDo) {
  const auto bytes = at::zeros({3}, at::kByte);
  EXPECT_EQ(found({floats(50), floats(0), bytes}, {floats(50), floats(0), bytes}).state, kAgree);
  EXPECT_EQ(found({at::zeros({5, 10}, at::kFloat)}, {floats(50)}).state, kAgree);
}

TEST(MessageHeaders, SayWhatDiffers) {
  HeaderResult result = found({floats(100)}, {floats(50)});
  EXPECT_EQ(result.state, kDiffer);
  EXPECT_EQ(result.difference,
            "rank 0 sent 400 bytes (message 0 between these ranks, fp32), but rank 1 expected 200 bytes (message 0 "
            "between these ranks, fp32)");
  result = found({at::zeros({25}, at::kDouble)}, {floats(50)});
  EXPECT_EQ(result.state, kDiffer);
  EXPECT_NE(result.difference.find("fp64"), std::string::npos) << result.difference;
  // An empty message in place of an expected one shows in the number of the next message.
  result = found({floats(0), floats(50)}, {floats(50)});
  EXPECT_EQ(result.state, kDiffer);
  EXPECT_NE(result.difference.find("sent 200 bytes (message 1"), std::string::npos) << result.difference;
}

TEST(MessageHeaders, EmptyTransfersHaveNone) {
  run_ranks(1, [](Communicator& comm) {
    MessageHeaders headers(comm.split(0, 0));
    EXPECT_EQ(headers.start({}, {}, Seconds(1)), nullptr);
    EXPECT_EQ(headers.start({{floats(0), 0}}, {{floats(0), 0}}, Seconds(1)), nullptr);
  });
}

TEST(MessageHeaders, HaveADeadline) {
  run_ranks(2, [](Communicator& comm) {
    MessageHeaders headers(comm.split(0, comm.rank()));
    if (comm.rank() == 0) {
      const auto comparison = headers.start({}, {{floats(50), 1}}, Seconds(0.05));
      try {
        result_of(*comparison);
        ADD_FAILURE() << "no error";
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kComm);
        EXPECT_NE(std::string(e.what()).find("0.05 s"), std::string::npos) << e.what();
      }
    }
    comm.barrier({"end", 0});
  });
}

// ---- Headers of collectives.

// Returns what each rank finds if rank `odd` begins another collective than the others.
std::vector<HeaderResult> found_of_collectives(int ranks, int odd, int64_t length, OpLabel label) {
  std::vector<HeaderResult> out(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](Communicator& comm) {
    MessageHeaders headers(comm.split(0, comm.rank()));
    const auto start = [&](int64_t call, int64_t n, OpLabel what) {
      const at::Tensor in = floats(n);
      return headers.start_collective(make_header(Collective::kAllGather, call, &in, -1, -1, what), what.counted,
                                      Seconds(20));
    };
    // Several operations are in progress at once, including an exchange, and are compared in another order.
    const auto before = start(0, 0, {"weights of layer 4", 7, "step"});
    const at::Tensor word = floats(1);
    const auto exchange =
        headers.start({{word, (comm.rank() + 1) % ranks}}, {{word, (comm.rank() + ranks - 1) % ranks}}, Seconds(20));
    const auto asked = comm.rank() == odd ? start(1, length, label) : start(1, 6, {"weights of layer 5", 7, "step"});
    out[static_cast<size_t>(comm.rank())] = result_of(*asked);
    EXPECT_EQ(result_of(*exchange).state, kAgree);
    EXPECT_EQ(result_of(*before).state, kAgree);
    EXPECT_EQ(asked->result().state, kAgree);  // a difference is reported only once
    comm.barrier({"end", 0});
  });
  return out;
}

TEST(CollectiveHeaders, AgreeWhereAllRanksBeginTheSame) {
  for (const HeaderResult& result : found_of_collectives(3, 2, 6, {"weights of layer 5", 7, "step"})) {
    EXPECT_EQ(result.state, kAgree) << result.difference;
  }
}

TEST(CollectiveHeaders, SayWhatDiffersOnEveryRank) {
  for (const HeaderResult& result : found_of_collectives(3, 2, 5, {"weights of layer 5", 8, "step"})) {
    EXPECT_EQ(result.state, kDiffer);
    EXPECT_EQ(result.difference,
              "ranks disagree in all_gather: step is 7 on ranks 0-1, 8 on rank 2; shape is [6] on ranks 0-1, [5] on "
              "rank 2");
  }
}

TEST(CollectiveHeaders, NameTheRanksThatDoNotBeginByTheDeadline) {
  run_ranks(3, [](Communicator& comm) {
    MessageHeaders headers(comm.split(0, comm.rank()));
    if (comm.rank() != 2) {
      const at::Tensor in = floats(6);
      const auto comparison = headers.start_collective(
          make_header(Collective::kAllGather, 0, &in, -1, -1, {"weights", 7}), "call", Seconds(0.05));
      try {
        result_of(*comparison);
        ADD_FAILURE() << "no error";
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kComm);
        EXPECT_NE(std::string(e.what()).find("rank 2 did not come within 0.05 s"), std::string::npos) << e.what();
      }
    }
    comm.barrier({"end", 0});
  });
}

}  // namespace
}  // namespace annulus::nccl_internal::nccl_headers_test
