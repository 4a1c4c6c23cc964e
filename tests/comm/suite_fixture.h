// What the files of the shared suite have in common: the fixture, tensors to send, errors to expect.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "common/error.h"
#include "tests/comm/suite.h"

namespace annulus::comm_test {

inline const std::vector<at::ScalarType> kDtypes{at::kFloat, at::kDouble, at::kBFloat16,
                                                 at::kHalf,  at::kLong,   at::kByte};
inline const std::vector<at::ScalarType> kReducible{at::kFloat, at::kDouble, at::kLong};

class CommSuite : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!backend().unavailable.empty()) GTEST_SKIP() << backend().unavailable;
  }
  void ranks(const std::function<void(Communicator&)>& body) { backend().run(GetParam(), body); }
};

inline at::TensorOptions options(at::ScalarType dtype) {
  return at::TensorOptions().dtype(dtype).device(backend().device);
}

// Values that say which rank made them and differ along the tensor; exact in every dtype.
at::Tensor pattern(int64_t n, at::ScalarType dtype, int seed);

// Body raises an Error of the kind, from comm, that holds each of the parts.
void expect_error(ErrorKind kind, const std::vector<std::string>& parts, const std::function<void()>& body);

// Two ranks exchange a word each, and wait for it: a backend that connects to a peer at the first message has done so.
void meet(Communicator& comm, int a, int b);

inline std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

}  // namespace annulus::comm_test
