// The contract of communicators over NCCL between processes. Every rank of an mpirun runs it, on its own GPU if there
// are enough, otherwise several ranks share one. Without a GPU it prints "SKIPPED: reason" and exits.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "comm/bootstrap/launch_info.h"
#include "comm/mpi/mpi_runtime.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/testing/contract.h"
#include "tests/comm/gpu_count.h"

namespace annulus {
namespace {

std::shared_ptr<MpiRuntime>& runtime() {
  static std::shared_ptr<MpiRuntime> runtime;
  return runtime;
}

int& device() {
  static int device = 0;
  return device;
}

const bool registered = contract::register_backend([] {
  contract::Backend backend;
  backend.name = "nccl";
  backend.device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device()));
  backend.sizes = {runtime()->size()};
  backend.run = [](int, const std::function<void(Communicator&)>& body) {
    // No test breaks the world's communicator; each test gets its own.
    static const std::unique_ptr<Communicator> world = [] {
      auto comm = runtime()->make_world();
      comm->set_timeout(Seconds(60));
      return comm;
    }();
    const std::unique_ptr<Communicator> comm =
        make_nccl_communicator(*world, {.device = device(), .timeout = Seconds(60)});
    comm->set_timeout(Seconds(30));
    body(*comm);
  };
  return backend;
});

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  using namespace annulus;
  const LaunchInfo launch = launch_info();
  if (const std::string why = comm_test::unavailable_to_processes(launch.local_size); !why.empty()) {
    if (launch.rank == 0) std::printf("SKIPPED: %s\n", why.c_str());
    return 0;
  }
  device() = comm_test::gpu_of_process(launch.local_rank, launch.local_size);
  comm_test::use_gpu(device());
  runtime() = MpiRuntime::start();
  ::testing::InitGoogleTest(&argc, argv);
  contract::leave_at_a_failure();
  const int result = RUN_ALL_TESTS();
  // The fault tests leave broken communicators.
  runtime()->finish(/*after_failures=*/true);
  std::_Exit(result);
}
