// The main function of a test program whose ranks are processes: link it in place of gtest_main, and start the program
// with mpi_test (bazel/mpi.bzl), annulus_add_mpi_test (CMake) or mpirun. Started alone, its ranks are threads.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "comm/bootstrap/bootstrap.h"
#include "comm/testing/ranks_test.h"

int main(int argc, char** argv) try {
  ::testing::InitGoogleTest(&argc, argv);
  annulus::Job job = annulus::bootstrap({});
  if (job.size > 1) annulus::testing::set_world(job.world.get());
  const int result = RUN_ALL_TESTS();
  // All ranks have the same result. A test may have left a broken communicator behind, on purpose or by a failure.
  if (result == 0 && job.runtime) job.runtime->finish(/*after_failures=*/true);
  std::fflush(nullptr);
  std::_Exit(result);
} catch (const annulus::ReportedError& e) {  // another rank has printed the message
  return e.exit_code();
} catch (const annulus::Error& e) {
  std::cerr << e.what() << "\n";
  return e.exit_code();
}
