// The shared suite of tests for every backend of Communicator. A backend's test file defines how to run ranks and on
// which device; the tests are in suite_*.cc. Each test runs once for each number of ranks that it can say something
// about. A single rank exchanges with itself.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace annulus::comm_test {

struct Backend {
  std::string name;
  at::Device device = at::kCPU;
  std::vector<int> sizes;  // numbers of ranks to test with
  // Runs body on each of the `size` ranks that are in this process, with a communicator that no earlier test has used.
  std::function<void(int size, const std::function<void(Communicator&)>& body)> run;
  // Why the backend cannot be tested here; empty if it can.
  std::string unavailable;
  bool large_rounds = false;  // sums are split into rounds of the default size
  bool lends = false;         // ranks of one host lend memory to each other
  // Why there are no sizes above 1 here; empty if that is no fault of the machine.
  std::string alone = "";
};

// Defined by the backend's test file. It is called after that file's main has set up what it needs.
Backend& backend();

// For ranks that are processes: the first test that fails on a rank ends that rank with exit code 1, so that the other
// ranks, which might never hear from it again, need not wait for their deadlines. Call after InitGoogleTest.
void leave_at_a_failure();

}  // namespace annulus::comm_test
