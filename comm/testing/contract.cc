// See contract.h and contract_fixture.h.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "comm/testing/contract_fixture.h"

namespace annulus::contract {

namespace {

std::function<Backend()>& registered() {
  static std::function<Backend()> make;
  return make;
}

}  // namespace

bool register_backend(std::function<Backend()> make) {
  registered() = std::move(make);
  return true;
}

const Backend& backend() {
  static const Backend backend = [] {
    if (!registered()) throw std::logic_error("the contract of communicators needs a backend: call register_backend()");
    return registered()();
  }();
  return backend;
}

at::Tensor pattern(int64_t n, at::ScalarType dtype, int seed) {
  at::Tensor values = at::empty({n}, at::kLong);
  auto* data = values.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i) data[i] = (i * 7 + seed * 31) % 120;
  return values.to(options(dtype));
}

void expect_error(ErrorKind kind, const std::vector<std::string>& parts, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    EXPECT_EQ(e.exit_code(), static_cast<int>(kind)) << e.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << "\"" << part << "\" is not in: " << e.what();
    }
    EXPECT_EQ(std::string(e.what()).rfind("[comm] ", 0), 0U) << e.what();
    return;
  } catch (const std::exception& e) {
    ADD_FAILURE() << "an exception of another type: " << e.what();
    return;
  }
  ADD_FAILURE() << "no error";
}

void finish(Work& work) {
  work.wait();
  while (!work.test()) sched_yield();
}

void meet(Communicator& comm, int a, int b) {
  if (comm.rank() != a && comm.rank() != b) return;
  const int peer = comm.rank() == a ? b : a;
  const at::Tensor out = at::zeros({1}, options(at::kLong));
  const at::Tensor in = at::empty({1}, options(at::kLong));
  auto work = comm.exchange({{out, peer}}, {{in, peer}}, {"meeting", 0});
  while (!work->test()) sched_yield();
}

namespace {

// Ends this process at a failure, whereupon mpirun ends all ranks.
class LeaveAtAFailure final : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo& test) override {
    if (!test.result()->Failed()) return;
    std::printf("[  FAILED  ] %s.%s on this rank, which ends the others\n", test.test_suite_name(), test.name());
    std::fflush(stdout);
    std::_Exit(1);
  }
};

}  // namespace

namespace {

std::vector<int> pairs() {
  std::vector<int> sizes;
  std::copy_if(backend().sizes.begin(), backend().sizes.end(), std::back_inserter(sizes), [](int n) { return n > 1; });
  // A test for one rank is skipped, which lists the reason.
  return sizes.empty() && !(backend().alone + backend().unavailable).empty() ? std::vector<int>{1} : sizes;
}

std::vector<int> if_true(bool condition, const std::vector<int>& sizes) {
  return condition ? sizes : std::vector<int>();
}

bool on_cpus() { return backend().device.is_cpu(); }

}  // namespace

#define ANNULUS_INSTANTIATE(fixture, sizes)               \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(fixture); \
  INSTANTIATE_TEST_SUITE_P(Ranks, fixture, ::testing::ValuesIn(sizes), ::testing::PrintToStringParamName())

ANNULUS_INSTANTIATE(CommSuite, backend().sizes);
ANNULUS_INSTANTIATE(CommPairs, pairs());
ANNULUS_INSTANTIATE(CommLending, if_true(backend().lends, pairs()));
ANNULUS_INSTANTIATE(CommOnCpus, if_true(on_cpus(), backend().sizes));
ANNULUS_INSTANTIATE(CommPairsOnCpus, if_true(on_cpus(), pairs()));

#undef ANNULUS_INSTANTIATE

void leave_at_a_failure() { ::testing::UnitTest::GetInstance()->listeners().Append(new LeaveAtAFailure); }

}  // namespace annulus::contract
