// Tests ring.h over two hosts whose cable is pulled. Linked with processes_main, for mpi_test(hosts = 2) of Bazel and
// HOSTS 2 of annulus_add_mpi_test.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "annulus/testing/ranks_test.h"
#include "annulus/testing/simulated_hosts.h"
#include "ring.h"

// What is lost is noticed at the deadline. The rank whose message is lost may not notice it.
ANNULUS_RANKS_TEST(RingOverHosts, EndsWhenACableIsPulled, 2) {
  if (!annulus::testing::on_simulated_host()) GTEST_SKIP() << "needs simulated hosts";
  const auto own = comm.split(0, comm.rank());
  own->set_timeout(annulus::Seconds(1));
  at::Tensor x = at::full({3}, 1.0, at::kDouble);
  ring_all_reduce(*own, x);
  EXPECT_EQ(x[0].item<double>(), 2);
  if (comm.rank() == 0) {
    annulus::testing::cut_host("host2");
    try {
      ring_all_reduce(*own, x);
    } catch (const std::exception&) {
    }
  } else {
    EXPECT_THROW(ring_all_reduce(*own, x), std::exception);
    annulus::testing::mend_host("host2");
  }
}
