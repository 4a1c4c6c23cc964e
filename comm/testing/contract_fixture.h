// What the files of the contract (contract_*.cc) have in common, and what further tests of a backend may use: the
// fixture, tensors to send, and expected errors.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "comm/testing/contract.h"
#include "common/error.h"

namespace annulus::contract {

inline const std::vector<at::ScalarType> kDtypes{at::kFloat, at::kDouble, at::kBFloat16,
                                                 at::kHalf,  at::kLong,   at::kByte};
inline const std::vector<at::ScalarType> kReducible{at::kFloat, at::kDouble, at::kLong};

// The backend that the program has registered. Raises std::logic_error if it has not.
const Backend& backend();

class CommSuite : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!backend().unavailable.empty()) GTEST_SKIP() << backend().unavailable;
  }
  void ranks(const std::function<void(Communicator&)>& body) { backend().run(GetParam(), body); }
};

// Tests that say nothing about one rank alone. They run with the numbers of ranks from two on; where a backend has none
// because of the machine, they are skipped with that reason (Backend::alone).
class CommPairs : public CommSuite {
 protected:
  void SetUp() override {
    CommSuite::SetUp();
    if (!IsSkipped() && GetParam() < 2) GTEST_SKIP() << backend().alone;
  }
  // Calls `body` on each rank with a communicator of its own for faults, and with the number of the last rank. All
  // ranks meet at the end, without that communicator, which may be dead by then.
  void with_faults(const std::function<void(Communicator& comm, Communicator& apart, int last)>& body) {
    ranks([&](Communicator& comm) {
      const auto apart = comm.split(0, comm.rank());
      body(comm, *apart, comm.size() - 1);
      comm.barrier({"end", 0});
    });
  }
};

// Tests of what only backends promise that lend memory, and of what only backends for CPU tensors promise. Other
// backends do not have these tests.
class CommLending : public CommPairs {};
class CommOnCpus : public CommSuite {};
class CommPairsOnCpus : public CommPairs {};

inline at::TensorOptions options(at::ScalarType dtype) {
  return at::TensorOptions().dtype(dtype).device(backend().device);
}

// Returns values that depend on `seed` (usually the rank) and differ along the tensor; they are exact in every dtype.
at::Tensor pattern(int64_t n, at::ScalarType dtype, int seed);

// Expects that body raises an Error of this kind, from comm, whose text contains each of the parts.
void expect_error(ErrorKind kind, const std::vector<std::string>& parts, const std::function<void()>& body);

// Ranks a and b exchange a word and wait for it, so that a backend that connects at the first message is connected.
void meet(Communicator& comm, int a, int b);

// Waits until it is complete. On a GPU wait() does not block, so that errors are found by polling.
void finish(Work& work);

inline int next_of(const Communicator& comm) { return (comm.rank() + 1) % comm.size(); }
inline int previous_of(const Communicator& comm) { return (comm.rank() + comm.size() - 1) % comm.size(); }

inline std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

}  // namespace annulus::contract
