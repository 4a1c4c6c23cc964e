// The contract of communicators over MPI, which every rank of an mpirun runs (see mpi_test in bazel/mpi.bzl).
// --piece=N sends messages longer than N bytes in pieces, which by default only messages above 1 GiB need. --unshared:
// ranks do not lend memory to each other.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/headers.h"
#include "comm/mpi/begun_collective.h"
#include "comm/mpi/mpi_runtime.h"
#include "comm/testing/contract_fixture.h"

namespace annulus {
namespace {

std::shared_ptr<MpiRuntime>& runtime() {
  static std::shared_ptr<MpiRuntime> runtime;
  return runtime;
}

const bool registered = contract::register_backend([] {
  contract::Backend backend;
  backend.name = "mpi";
  backend.sizes = {runtime()->size()};
  backend.run = [](int, const std::function<void(Communicator&)>& body) {
    // No test breaks the world's communicator; each test gets its own.
    static const std::unique_ptr<Communicator> world = [] {
      auto comm = runtime()->make_world();
      comm->set_timeout(Seconds(20));
      return comm;
    }();
    const std::unique_ptr<Communicator> comm = world->split(0, world->rank());
    body(*comm);
  };
  backend.large_rounds = runtime()->options().max_piece_bytes == MpiOptions().max_piece_bytes;
  backend.lends = runtime()->options().share_memory;
  return backend;
});

TEST(Mpi, FormsTheRequestedWorld) {
  const char* wanted = std::getenv("WANT_SIZE");
  ASSERT_NE(wanted, nullptr) << "run by mpi_test";
  EXPECT_EQ(runtime()->size(), std::atoi(wanted));
  EXPECT_FALSE(runtime()->version().empty());
}

// Returns the value of an Open MPI setting from its tools interface; -1 if there is no such setting.
int setting(const char* name) {
  int provided = 0, index = 0, count = 0, value = -1;
  MPI_T_cvar_handle handle = MPI_T_CVAR_HANDLE_NULL;
  EXPECT_EQ(MPI_T_init_thread(MPI_THREAD_SERIALIZED, &provided), MPI_SUCCESS);
  if (MPI_T_cvar_get_index(name, &index) == MPI_SUCCESS &&
      MPI_T_cvar_handle_alloc(index, nullptr, &handle, &count) == MPI_SUCCESS) {
    EXPECT_EQ(MPI_T_cvar_read(handle, &value), MPI_SUCCESS);
    MPI_T_cvar_handle_free(&handle);
  }
  MPI_T_finalize();
  return value;
}

// By default Open MPI sends three fragments of 32 KiB in a call, so that a long message takes hundreds of calls,
// between which waiting ranks sleep.
TEST(Mpi, SetsTheSendPipelineDepth) {
  const char* own = std::getenv("WANT_DEPTH");
  EXPECT_EQ(setting("pml_ob1_send_pipeline_depth"), own != nullptr ? std::atoi(own) : 32);
}

// Every error about a deadline ends with what is known about the ranks that others wait for. Both parts use the ranks'
// numbers in the job.
TEST(Mpi, NamesRanksByTheirNumbersInTheJob) {
  const int size = runtime()->size(), last = size - 1;
  std::vector<int> reversed(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) reversed[static_cast<size_t>(rank)] = last - rank;
  contract::backend().run(size, [&](Communicator& comm) {
    const auto apart = comm.split(0, comm.rank());
    runtime()->number_ranks(reversed);
    EXPECT_EQ(apart->in_job(0), last);
    if (comm.rank() == 0 && size > 1) {  // a single rank waits for nobody
      apart->set_timeout(Seconds(0.2));
      contract::expect_error(
          ErrorKind::kComm, {"from rank 0 of the job: not done within 0.2 s; rank " + std::to_string(last) + " sleeps"},
          [&] {
            at::Tensor in = at::empty({4}, at::kFloat);
            apart->exchange({}, {{in, last}}, {"ring", 1, "hop"})->wait();
          });
    }
    runtime()->number_ranks({});
    comm.barrier({"end"});
  });
}

// Events are only ever counted up, so that a waiting rank misses none between two looks: the messages of a completed
// step stay counted. In each step of a reduce_scatter, each rank sends a message to every other rank and receives one.
TEST(Mpi, CountsEveryMessageOfACollective) {
  using namespace comm_internal;
  contract::backend().run(runtime()->size(), [&](Communicator& comm) {
    MPI_Comm control = MPI_COMM_NULL;
    ASSERT_EQ(MPI_Comm_dup(MPI_COMM_WORLD, &control), MPI_SUCCESS);
    constexpr int64_t kSteps = 5, kMost = 400;  // bytes of a message
    const at::Tensor in = at::zeros({comm.size(), kSteps * kMost / 4}, at::kFloat);
    const at::Tensor out = at::zeros({kSteps * kMost / 4}, at::kFloat);
    const OpLabel label{"counted", 0};
    const CollectiveHeader header =
        make_header(Collective::kReduceScatter, 0, &in, static_cast<int>(ReduceOp::kSum), -1, label);
    mpi_internal::MpiBegunCollective begun(comm, control, kMost,
                                           {header, out, in, label, std::make_shared<int64_t>(0)});
    begun.start_headers();
    int64_t events = 0;
    while (!begun.over()) {
      begun.advance();
      EXPECT_GE(begun.movement().events, events);
      events = begun.movement().events;
    }
    EXPECT_TRUE(begun.complete());
    EXPECT_EQ(events, 1 + kSteps * 2 * (comm.size() - 1));  // 1: the agreement
    MPI_Comm_free(&control);
  });
}

// Rank 0 computes, as far as the others can tell: after it has begun the sum it only calls progress().
TEST(Mpi, PollingMovesWhatWasBegunAlong) {
  if (runtime()->size() == 1) GTEST_SKIP() << "needs two ranks";
  contract::backend().run(runtime()->size(), [&](Communicator& comm) {
    at::Tensor sum = at::ones({100'000}, at::kFloat);
    const auto work = comm.begin_all_reduce(sum, ReduceOp::kSum, {"polled", 0});
    if (comm.rank() == 0) {
      for (int came = 0, others = comm.size() - 1; came < others;) {
        comm.progress();
        int found = 0;
        MPI_Status status;
        ASSERT_EQ(MPI_Iprobe(MPI_ANY_SOURCE, 7, MPI_COMM_WORLD, &found, &status), MPI_SUCCESS);
        if (found == 0) continue;
        MPI_Recv(nullptr, 0, MPI_BYTE, status.MPI_SOURCE, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        ++came;
      }
    } else {
      work->wait();
      MPI_Send(nullptr, 0, MPI_BYTE, 0, 7, MPI_COMM_WORLD);
    }
    work->wait();
    EXPECT_EQ(sum[99'999].item<float>(), static_cast<float>(comm.size()));
  });
}

}  // namespace

}  // namespace annulus

int main(int argc, char** argv) {
  annulus::MpiOptions options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.substr(0, 8) == "--piece=") options.max_piece_bytes = std::atoll(argv[i] + 8);
    if (argument == "--unshared") options.share_memory = false;
  }
  options.describe_stalled = [](const std::function<int(int)>& in_job) {
    return "rank " + std::to_string(in_job(0)) + " sleeps";
  };
  annulus::runtime() = annulus::MpiRuntime::start(options);
  ::testing::InitGoogleTest(&argc, argv);
  annulus::contract::leave_at_a_failure();
  const int result = RUN_ALL_TESTS();
  // The fault tests leave broken communicators.
  annulus::runtime()->finish(/*after_failures=*/true);
  std::_Exit(result);
}
