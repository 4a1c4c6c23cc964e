// The contract of communicators over NCCL with 1, 2, 3 and 8 ranks (threads of this process, each with a GPU), as far
// as the machine has GPUs. It is also built without CUDA, and the suite is skipped, with the reason, without a GPU.
#include "comm/nccl/nccl_communicator.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "comm/testing/contract.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "tests/comm/gpu_count.h"

namespace annulus {

namespace {

const bool registered = contract::register_backend([] {
  contract::Backend b;
  b.name = "nccl";
  b.device = at::Device(at::kCUDA);
  b.unavailable = nccl_unavailable();
  b.sizes = {1};
  for (const int n : {2, 3, 8}) {  // a pair, an odd number and a whole host; each makes new communicators
    if (n <= comm_test::gpu_count()) b.sizes.push_back(n);
  }
  b.alone = "this machine has one GPU";
  b.run = [](int size, const std::function<void(Communicator&)>& body) {
    run_ranks(size, [&](Communicator& host) {
      comm_test::use_gpu(host.rank());
      host.set_timeout(Seconds(120));
      NcclOptions options;
      options.device = host.rank();
      options.timeout = Seconds(120);
      const std::unique_ptr<Communicator> comm = make_nccl_communicator(host, options);
      comm->set_timeout(Seconds(60));
      body(*comm);
    });
  };
  return b;
});

TEST(Nccl, UnavailabilityErrorGivesTheReason) {
  const std::string why = nccl_unavailable();
  if (why.empty()) GTEST_SKIP() << "this machine has a GPU";
  const std::shared_ptr<Communicator> host = make_self_communicator();
  try {
    make_nccl_communicator(*host, {});
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kUnavailable);
    EXPECT_NE(std::string(e.what()).find(why), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace annulus
