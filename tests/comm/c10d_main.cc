// The contract of communicators over a process group of PyTorch, and tests that only such groups need: a shared library
// that c10d_test.py loads into the processes of a job. Environment variables name the groups: ANNULUS_WORLD has all
// ranks, ANNULUS_ROW and ANNULUS_COLUMN are those of this rank in a 2 x 2 mesh, and ANNULUS_ODD has ranks 1 and 3; the
// last three are set if there are four ranks. ANNULUS_FIRST and ANNULUS_SECOND also have all ranks and are set if there
// are several. If ANNULUS_DEVICE is set, the contract runs over the communicator for tensors of a device, with gloo and
// CPU tensors instead of NCCL and a GPU.
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <vector>

#include "comm/c10d/c10d_communicator.h"
#include "comm/c10d/groups.h"
#include "comm/c10d/internal.h"
#include "comm/testing/contract_fixture.h"

namespace annulus {
namespace {

using contract::expect_error;
using contract::pattern;

std::string group(const char* variable) {
  const char* name = std::getenv(variable);
  return name == nullptr ? "" : name;
}

std::shared_ptr<Communicator> comm_of(const char* variable) {
  return c10d_communicator(group(variable), at::kCPU, Seconds(20));
}

// Sends a tensor to the next rank and sums, while an all_gather is in progress. `seed` distinguishes communicators.
void use(Communicator& comm, int seed) {
  const int size = comm.size(), rank = comm.rank(), next = (rank + 1) % size, previous = (rank + size - 1) % size;
  at::Tensor all = at::empty({size, 3000}, at::kFloat), in = at::empty({5000}, at::kFloat);
  const auto gather = comm.begin_all_gather(all, pattern(3000, at::kFloat, seed + rank), {"weights", seed});
  const auto ring =
      comm.exchange({{pattern(5000, at::kFloat, seed + 10 * rank), next}}, {{in, previous}}, {"ring", seed});
  at::Tensor sum = at::full({10}, comm.in_job(rank) + seed, at::kLong);
  comm.all_reduce(sum, ReduceOp::kSum, {"sum", seed});
  int64_t expected = 0;
  for (int r = 0; r < size; ++r) expected += comm.in_job(r) + seed;
  EXPECT_TRUE(at::equal(sum, at::full({10}, expected, at::kLong)));
  ring->wait();
  gather->wait();
  EXPECT_TRUE(at::equal(in, pattern(5000, at::kFloat, seed + 10 * previous)));
  for (int r = 0; r < size; ++r) EXPECT_TRUE(at::equal(all[r], pattern(3000, at::kFloat, seed + r)));
}

TEST(C10d, GroupsAreFoundByName) {
  const auto comm = comm_of("ANNULUS_WORLD");
  EXPECT_EQ(c10d_communicator(group("ANNULUS_WORLD"), at::kCPU, Seconds(30)), comm);
  EXPECT_EQ(comm->timeout(), Seconds(20));  // as at the first call
  expect_error(ErrorKind::kUsage, {"\"no such group\"", "init_process_group"},
               [] { c10d_communicator("no such group", at::kCPU, Seconds(20)); });
}

TEST(C10d, CommunicatorsOverOneGroupAreIndependent) {
  const auto registered = c10d::resolve_process_group(group("ANNULUS_WORLD"));
  const auto first = make_c10d_communicator(registered, at::kCPU, Seconds(20));
  {
    const auto second = make_c10d_communicator(registered, at::kCPU, Seconds(20));
    const auto third = first->split(0, -first->rank());
    // A message of one communicator is not received by another, in whatever order ranks use them.
    at::Tensor one = pattern(6000, at::kFloat, 1), two = pattern(6000, at::kFloat, 2);
    at::Tensor from_one = at::empty({6000}, at::kFloat), from_two = at::empty({6000}, at::kFloat);
    const int size = first->size(), next = (first->rank() + 1) % size, previous = (first->rank() + size - 1) % size;
    const auto a = first->exchange({{one, next}}, {}, {"ring", 1});
    const auto b = second->exchange({{two, next}}, {{from_two, previous}}, {"ring", 2});
    b->wait();
    const auto c = first->exchange({}, {{from_one, previous}}, {"ring", 1});
    c->wait();
    a->wait();
    EXPECT_TRUE(at::equal(from_one, one));
    EXPECT_TRUE(at::equal(from_two, two));
    use(*third, 3);
  }
  use(*first, 4);
}

// The caller's own use of its group does not mix with our messages.
TEST(C10d, CallersOwnTrafficIsSeparate) {
  const auto registered = c10d::resolve_process_group(group("ANNULUS_WORLD"));
  const auto comm = comm_of("ANNULUS_WORLD");
  const int size = comm->size(), next = (comm->rank() + 1) % size, previous = (comm->rank() + size - 1) % size;
  std::vector<at::Tensor> ones{at::full({1000}, 1, at::kFloat)}, sent{pattern(3000, at::kFloat, comm->rank())},
      received{at::empty({3000}, at::kFloat)};
  const at::Tensor ring = at::empty({9000}, at::kFloat);
  const auto work = comm->exchange({{pattern(9000, at::kFloat, 7), next}}, {{ring, previous}}, {"ring", 1});
  const auto sum = registered->allreduce(ones);
  std::vector<c10::intrusive_ptr<c10d::Work>> pair;
  if (size > 1) pair = {registered->send(sent, next, 0), registered->recv(received, previous, 0)};
  comm->barrier({"between"});
  sum->wait();
  for (const auto& half : pair) half->wait();
  work->wait();
  EXPECT_TRUE(at::equal(ones[0], at::full({1000}, size, at::kFloat)));
  if (size > 1) {
    EXPECT_TRUE(at::equal(received[0], pattern(3000, at::kFloat, previous)));
  }
  EXPECT_TRUE(at::equal(ring, pattern(9000, at::kFloat, 7)));
}

// Each rank opens two groups in two threads, and ranks begin with different groups. Neither group delays the other.
TEST(C10d, GroupsOpenInAnyOrder) {
  if (group("ANNULUS_FIRST").empty()) GTEST_SKIP() << "needs two ranks";
  const bool odd = comm_of("ANNULUS_WORLD")->rank() % 2 == 1;
  std::shared_ptr<Communicator> early, late;
  std::thread other([&] { early = comm_of(odd ? "ANNULUS_SECOND" : "ANNULUS_FIRST"); });
  late = comm_of(odd ? "ANNULUS_FIRST" : "ANNULUS_SECOND");
  other.join();
  use(odd ? *late : *early, 1);
  use(odd ? *early : *late, 2);
}

TEST(C10d, MeshGroupsWorkConcurrently) {
  if (group("ANNULUS_ROW").empty()) GTEST_SKIP() << "needs four ranks";
  const auto row = comm_of("ANNULUS_ROW"), column = comm_of("ANNULUS_COLUMN"), world = comm_of("ANNULUS_WORLD");
  const int me = world->rank();
  EXPECT_EQ(row->in_job(0), me / 2 * 2);
  EXPECT_EQ(column->in_job(1), me % 2 + 2);
  for (int round = 0; round < 3; ++round) {
    const at::Tensor along_row = at::empty({2, 20000}, at::kFloat), sum = at::empty({20000}, at::kFloat);
    const auto gather = row->begin_all_gather(along_row, pattern(20000, at::kFloat, me), {"weights", round});
    const auto scatter = column->begin_reduce_scatter(sum, at::full({2, 20000}, me, at::kFloat), {"gradients", round});
    use(*column, round);
    use(*row, round);
    scatter->wait();
    gather->wait();
    EXPECT_TRUE(at::equal(along_row[me % 2], pattern(20000, at::kFloat, me)));
    EXPECT_TRUE(at::equal(along_row[1 - me % 2], pattern(20000, at::kFloat, me ^ 1)));
    EXPECT_TRUE(at::equal(sum, at::full({20000}, me + (me ^ 2), at::kFloat)));
  }
}

// The ranks of the group are not 0..n-1 of the job, and error texts name the ranks of the job.
TEST(C10d, ErrorsOfASubgroupNameRanksOfTheJob) {
  if (group("ANNULUS_ROW").empty()) GTEST_SKIP() << "needs four ranks";
  const auto world = comm_of("ANNULUS_WORLD");
  if (!group("ANNULUS_ODD").empty()) {
    const auto odd = comm_of("ANNULUS_ODD");
    ASSERT_EQ(odd->size(), 2);
    EXPECT_EQ(odd->in_job(odd->rank()), world->rank());
    use(*odd, 5);
    const at::Tensor mine = at::zeros({odd->rank() + 4}, at::kFloat);
    at::Tensor all = at::empty({2, odd->rank() + 4}, at::kFloat);
    expect_error(ErrorKind::kMismatch, {"shape is [4] on rank 1 of the job, [5] on rank 3 of the job"}, [&] {
      odd->all_gather(all, mine, {"lengths", 1});
    });
    const auto apart = odd->split(0, 0);
    if (odd->rank() == 0) {
      apart->set_timeout(Seconds(0.3));
      expect_error(ErrorKind::kComm, {"rank 3 of the job did not come within 0.3 s"}, [&] {
        apart->barrier({"step", 2});
      });
    }
  }
  world->barrier({"end"});
}

std::shared_ptr<Communicator> whole() {
  if (std::getenv("ANNULUS_DEVICE") == nullptr) return comm_of("ANNULUS_WORLD");
  const auto registered = c10d::resolve_process_group(group("ANNULUS_WORLD"));
  std::shared_ptr<Communicator> device = c10d_internal::make_device_communicator(
      registered, at::kCPU, c10d_internal::make_host_communicator(registered, Seconds(20)));
  device->set_timeout(Seconds(20));
  return device;
}

// An unexpected message is never handed to the device.
TEST(C10d, HostsFindMismatchesOfADevice) {
  const auto comm = whole()->split(0, 0);
  if (comm->size() < 2) GTEST_SKIP() << "needs two ranks";
  if (comm->rank() > 1) return;  // two of the ranks disagree, the others have no part in it
  const int peer = 1 - comm->rank();
  const at::Tensor in = at::empty({50}, at::kFloat), out = at::zeros({100}, at::kFloat);
  const auto exchange = [&] { comm->exchange({{out, peer}}, {{in, peer}}, {"layer 1", 4, "step"})->wait(); };
  expect_error(ErrorKind::kMismatch,
               {"layer 1, step 4: rank " + std::to_string(peer) + " sent 400 bytes", "expected 200"}, exchange);
  expect_error(ErrorKind::kComm, {"dead"}, exchange);
}

const bool registered = contract::register_backend([] {
  contract::Backend backend;
  backend.name = "c10d";
  backend.sizes = {std::atoi(std::getenv("WORLD_SIZE"))};
  backend.run = [](int, const std::function<void(Communicator&)>& body) {
    static const std::shared_ptr<Communicator> world = whole();
    const std::unique_ptr<Communicator> comm = world->split(0, 0);
    body(*comm);
  };
  backend.large_rounds = true;
  return backend;
});

}  // namespace
}  // namespace annulus

extern "C" {

// Runs the tests that a GoogleTest filter selects; returns 0 if all pass.
int run_tests(const char* filter) {
  int argc = 1;
  std::string program = "c10d_test";
  char* argv[] = {program.data(), nullptr};
  ::testing::InitGoogleTest(&argc, argv);
  testing::GTEST_FLAG(filter) = filter;
  annulus::contract::leave_at_a_failure();
  return RUN_ALL_TESTS();
}

void release_ended_groups() { annulus::release_ended_groups(); }

// Writes to `text` the sum of the ranks' numbers in the job, over the ranks of a group, or the error.
void sum_of_ranks(const char* name, double timeout, char* text, int64_t size) {
  std::string said;
  try {
    const auto comm = annulus::c10d_communicator(name, at::kCPU, annulus::Seconds(timeout));
    at::Tensor sum = at::full({1}, comm->in_job(comm->rank()), at::kLong);
    comm->all_reduce(sum, annulus::ReduceOp::kSum, {"sum of ranks"});
    said = std::to_string(*sum.const_data_ptr<int64_t>());
  } catch (const std::exception& e) {
    said = e.what();
  }
  std::strncpy(text, said.c_str(), static_cast<size_t>(size) - 1);
}
}
